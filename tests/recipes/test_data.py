import shutil

import pytest
import torch

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.data import DigitsData, ImageFolderData, shift_and_noise


def test_digits_are_split_without_overlap_and_alike_every_time():
    first, second = DigitsData(), DigitsData()
    for data in (first, second):
        data.setup("fit")
    assert (len(first.train_set), len(first.test_set)) == (1078, 719)
    assert torch.equal(first.train_set.tensors[0], second.train_set.tensors[0])
    train = {image.numpy().tobytes() for image in first.train_set.tensors[0]}
    assert not any(image.numpy().tobytes() in train for image in first.test_set.tensors[0])


def test_digits_batches_have_one_shape():
    data = DigitsData(batch_size=64, image_size=24)
    data.setup("fit")
    shapes = {images.shape for images, _ in data.train_dataloader()}
    assert shapes == {(64, 1, 24, 24)}
    images, labels = next(iter(data.val_dataloader()))
    assert 0 <= images.min() <= images.max() <= 1
    assert labels.dtype == torch.int64


def test_augmentation_moves_pixels_and_keeps_the_shape():
    images = torch.zeros(2, 1, 16, 16)
    images[:, :, 8, 8] = 10
    moved = shift_and_noise(images, max_shift=2)
    assert moved.shape == images.shape
    rows, columns = (moved[0, 0] > 5).nonzero()[0].tolist()
    assert abs(rows - 8) <= 2
    assert abs(columns - 8) <= 2


@pytest.mark.parametrize(("batch_size", "image_size"), [(0, 16), (64, 7)])
def test_digits_refuse_sizes_that_cannot_be_used(batch_size, image_size):
    with pytest.raises(ConfigError, match=r"(?s)batch_size=.*image_size=.*HINT"):
        DigitsData(batch_size, image_size)


def test_image_folders_give_normalised_square_batches(image_root):
    data = ImageFolderData(str(image_root), n_classes=2, batch_size=2, image_size=16, n_workers=0)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (2, 3, 16, 16)
    assert set(labels.tolist()) <= {0, 1}
    light = torch.cat([images[labels == 1] for images, labels in data.val_dataloader()])
    assert len(light) == 3
    assert light.min() > 1


def test_without_a_test_folder_the_validation_images_are_the_test(image_root):
    data = ImageFolderData(str(image_root), n_classes=2, n_workers=0)
    data.setup("test")
    assert data.test_set is data.val_set


@pytest.mark.parametrize("split", ["val", "test"])
def test_other_class_names_are_refused_by_name(image_root, split):
    if split == "test":
        shutil.copytree(image_root / "val", image_root / "test")
    (image_root / split / "dark").rename(image_root / split / "bright")
    with pytest.raises(
        ConfigError, match=rf"(?s){split} are not those.*bright only in {split}, dark only in train.*HINT"
    ):
        ImageFolderData(str(image_root), n_classes=2, n_workers=0).setup("fit")


def test_a_missing_folder_and_a_wrong_class_count_say_what_to_do(image_root, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)data\.root=.*no folder 'train'.*HINT"):
        ImageFolderData(str(tmp_path / "absent"), n_classes=2).setup("fit")
    with pytest.raises(ConfigError, match=r"(?s)n_classes=5.*holds 2 classes.*Set task\.n_classes=2"):
        ImageFolderData(str(image_root), n_classes=5).setup("fit")
