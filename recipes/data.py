"""Data modules of the recipes: scikit-learn's handwritten digits (no download) and folders of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ctdr_lightning.basics.errors import ConfigError

_TEST_SHARE = 0.4


class DigitsData(LightningDataModule):
    """The 1797 real handwritten digits that scikit-learn carries: 1078 to train on, 719 held out.

    Batches are images with shape ``(N, 1, image_size, image_size)`` in [0, 1] and labels with shape ``(N,)``.
    Training images are shifted by up to a sixteenth of their side and get Gaussian noise.

    Args:
        batch_size: Images in a batch.
        image_size: Side of the images after bilinear upsampling from 8 x 8 pixels.

    Raises:
        ConfigError: When ``batch_size`` or ``image_size`` is too small to use.
    """

    def __init__(self, batch_size: int = 64, image_size: int = 16) -> None:
        super().__init__()
        if batch_size < 1 or image_size < 8:
            raise ConfigError(
                f"batch_size={batch_size} and image_size={image_size} must be at least 1 and 8.",
                "Use the defaults: 64 and 16.",
            )
        self.batch_size = batch_size
        self.image_size = image_size

    def setup(self, stage: str) -> None:
        """Load, upsample and split the images; the split is the same in every run."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        small = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        large = F.interpolate(small, size=(self.image_size, self.image_size), mode="bilinear")
        train, test = train_test_split(range(len(labels)), test_size=_TEST_SHARE, random_state=0, stratify=labels)
        targets = torch.tensor(labels)
        self.train_set = TensorDataset(large[train], targets[train])
        self.test_set = TensorDataset(large[test], targets[test])

    def train_dataloader(self) -> DataLoader:
        """Shuffled training images; the last batch is dropped when it is smaller than the others."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """The held-out images."""
        return DataLoader(self.test_set, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The held-out images: there is no third split in so small a set."""
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment the whole batch at once while training."""
        if self.trainer is None or not self.trainer.training:
            return batch
        images, labels = batch
        return _shift_and_noise(images, max_shift=self.image_size // 16), labels


def _shift_and_noise(images: Tensor, max_shift: int) -> Tensor:
    dx, dy = torch.randint(-max_shift, max_shift + 1, (2,)).tolist()
    return torch.roll(images, (dx, dy), (2, 3)) + 0.15 * torch.randn_like(images)


class ImageFolderData(LightningDataModule):
    """Folders of images in ImageNet's layout: ``root/train/<class>/*.jpg`` and ``root/val/<class>/*.jpg``.

    Batches are images with shape ``(N, 3, image_size, image_size)``, normalised with ImageNet's statistics, and labels
    with shape ``(N,)``. ``root/test`` is used for testing where it exists, ``root/val`` otherwise.

    Args:
        root: The folder that holds ``train`` and ``val``.
        n_classes: Number of classes the model is built for; checked against what is found.
        batch_size: Images in a batch.
        image_size: Side of the square images after cropping.
        n_workers: Processes that load images.

    Raises:
        ConfigError: In ``setup``, when a folder is missing or holds another number of classes.
    """

    def __init__(
        self, root: str, n_classes: int, batch_size: int = 64, image_size: int = 224, n_workers: int = 4
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.n_classes = n_classes
        self.batch_size = batch_size
        self.image_size = image_size
        self.n_workers = n_workers

    def setup(self, stage: str) -> None:
        """Find the images and check the number of classes."""
        self.train_set = self._folder("train", augment=True)
        self.val_set = self._folder("val")
        self.test_set = self._folder("test") if (self.root / "test").is_dir() else self.val_set

    def train_dataloader(self) -> DataLoader:
        """Shuffled, randomly cropped and flipped training images."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Centre-cropped validation images."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        """Centre-cropped test images."""
        return self._loader(self.test_set)

    def _folder(self, split: str, augment: bool = False) -> Dataset:
        folder = self.root / split
        if not folder.is_dir():
            raise ConfigError(
                f"data.root={str(self.root)!r} has no folder {split!r}.",
                f"Put the images into {folder}/<class>/ (ImageNet's layout), or point data.root elsewhere.",
            )
        from torchvision.datasets import ImageFolder

        images = ImageFolder(str(folder), transform=_transform(self.image_size, augment))
        if len(images.classes) != self.n_classes:
            raise ConfigError(
                f"task.n_classes={self.n_classes}, but {folder} holds {len(images.classes)} classes.",
                f"Set task.n_classes={len(images.classes)}.",
            )
        return images

    def _loader(self, images: Dataset, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            images,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.n_workers,
            persistent_workers=self.n_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _transform(image_size: int, augment: bool) -> Any:
    from torchvision import transforms as T

    crop = (
        [T.RandomResizedCrop(image_size), T.RandomHorizontalFlip()]
        if augment
        else [T.Resize(image_size * 8 // 7), T.CenterCrop(image_size)]
    )
    return T.Compose([*crop, T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
