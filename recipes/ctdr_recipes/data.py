"""Data modules of the recipes: scikit-learn's handwritten digits (no download) and folders of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ctdr_lightning.basics.errors import ConfigError
from ctdr_recipes.building import missing
from ctdr_recipes.resume import ResumableLoader

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
        return ResumableLoader(
            self.train_set, self.batch_size, shuffle=True, drop_last=True, epoch_batches=partial(_epoch_batches, self)
        )

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
        return shift_and_noise(images, max_shift=self.image_size // 16), labels


def _epoch_batches(data: LightningDataModule) -> float:
    return float("inf") if data.trainer is None else data.trainer.num_training_batches


def shift_and_noise(images: Tensor, max_shift: int) -> Tensor:
    """Roll a batch of images (N, C, H, W) by up to so many pixels each way, and add noise of deviation 0.15."""
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
        ConfigError: In ``setup``, when a folder is missing, or holds another number of classes or other classes, or
            torchvision is not installed.
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
        """Find the images, and check the number of classes and their names."""
        self.train_set = self._folder("train", augment=True)
        self.val_set = self._folder("val")
        self.test_set = self._folder("test") if (self.root / "test").is_dir() else self.val_set
        for name, images in (("val", self.val_set), ("test", self.test_set)):
            self._check_names(name, images)

    def train_dataloader(self) -> DataLoader:
        """Shuffled, randomly cropped and flipped training images."""
        own = partial(_epoch_batches, self)
        return ResumableLoader(self.train_set, **self._options(), shuffle=True, drop_last=True, epoch_batches=own)

    def val_dataloader(self) -> DataLoader:
        """Centre-cropped validation images."""
        return DataLoader(self.val_set, **self._options())

    def test_dataloader(self) -> DataLoader:
        """Centre-cropped test images."""
        return DataLoader(self.test_set, **self._options())

    def _check_names(self, split: str, images: Any) -> None:
        """Labels are positions in the sorted names, so other names mean other labels."""
        here, wanted = set(images.classes), set(self.train_set.classes)
        if here != wanted:
            raise ConfigError(
                f"the classes in {self.root / split} are not those in {self.root / 'train'}: "
                f"{_names(here - wanted)} only in {split}, {_names(wanted - here)} only in train.",
                "Give both the same class folders; labels are positions in their sorted names.",
            )

    def _folder(self, split: str, augment: bool = False) -> Any:
        folder = self.root / split
        if not folder.is_dir():
            raise ConfigError(
                f"data.root={str(self.root)!r} has no folder {split!r}.",
                f"Put the images into {folder}/<class>/ (ImageNet's layout), or point data.root elsewhere.",
            )
        try:
            from torchvision.datasets import ImageFolder
        except ModuleNotFoundError as error:
            raise missing(error) from error

        images = ImageFolder(str(folder), transform=_transform(self.image_size, augment))
        if len(images.classes) != self.n_classes:
            raise ConfigError(
                f"task.n_classes={self.n_classes}, but {folder} holds {len(images.classes)} classes.",
                f"Set task.n_classes={len(images.classes)}.",
            )
        return images

    def _options(self) -> dict[str, Any]:
        # Workers that persist would keep their random state over epochs, which no checkpoint holds.
        return {
            "batch_size": self.batch_size,
            "num_workers": self.n_workers,
            "pin_memory": torch.cuda.is_available(),
        }


def _names(classes: set[str]) -> str:
    shown = ", ".join(sorted(classes)[:5]) or "none"
    return f"{shown} and {len(classes) - 5} more" if len(classes) > 5 else shown


def _transform(image_size: int, augment: bool) -> Any:
    from torchvision import transforms as T

    crop = (
        [T.RandomResizedCrop(image_size), T.RandomHorizontalFlip()]
        if augment
        else [T.Resize(image_size * 8 // 7), T.CenterCrop(image_size)]
    )
    return T.Compose([*crop, T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
