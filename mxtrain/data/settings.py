"""The settings of the data; importable without mxnet."""

from dataclasses import dataclass
from typing import Literal, Optional, get_args

from mxtrain.errors import UserError

Augment = Literal["none", "flip", "shift", "shift-flip", "crop"]
LastBatch = Literal["keep", "drop"]


@dataclass
class DataConfig:
    """Which samples a run trains and validates on, and how they are delivered."""

    data: str = "digits"
    """Samples: "digits" (built in), a folder with MNIST-style idx files, a CIFAR-10 or CIFAR-100 folder, or a
    folder of images with one folder per class or with train/ and val/ of such folders."""

    val: Optional[str] = None
    """Folder with the validation samples, of the same kind as the data (default: the data's own validation
    part)."""

    val_split: Optional[float] = None
    """Share of the training samples that is held out where there is no validation part, 0 for none (default:
    0.2 for "digits", else 0.1); the choice of samples is fixed and does not depend on the seed."""

    image_size: Optional[int] = None
    """Height and width in pixels of the images given to the network (default: 224 for a folder of images,
    else as stored)."""

    resize: Optional[int] = None
    """Shorter side in pixels that an evaluated image is scaled to before its center is cut out (default: 8/7
    of the image size for a folder of images, else the image size)."""

    augment: Optional[Augment] = None
    """Random changes to training images: none, flip (mirrored left to right), shift (moved by up to an eighth
    of the side), shift-flip, or crop (random resized crop, mirrored); default: crop for a folder of images,
    shift-flip for CIFAR, else none."""

    workers: int = 0
    """Threads that read and decode ahead of the training (0: read in the training thread); never changes the
    samples."""

    last_batch: LastBatch = "keep"
    """What happens to a training epoch's last batch when it is short: keep it, or drop it."""

    def __post_init__(self):
        if not self.data:
            raise UserError('--data is empty: give "digits" or a path')
        if self.val == "":
            raise UserError("--val is empty: give a path, or leave it out")
        if self.val_split is not None and not 0 <= self.val_split < 1:
            raise UserError(f"--val-split {self.val_split}: must be at least 0 and below 1")
        if self.val is not None and self.val_split is not None:
            raise UserError(
                f"--val-split {self.val_split} has no effect with --val {self.val}: give one of them"
            )
        for flag, pixels in (("--image-size", self.image_size), ("--resize", self.resize)):
            if pixels is not None and pixels < 1:
                raise UserError(f"{flag} {pixels}: must be at least 1 pixel")
        if self.image_size is not None and self.resize is not None and self.resize < self.image_size:
            raise UserError(f"--resize {self.resize}: must be at least --image-size {self.image_size}")
        if self.augment is not None and self.augment not in get_args(Augment):
            raise UserError(f"--augment {self.augment}: must be one of {', '.join(get_args(Augment))}")
        if self.workers < 0:
            raise UserError(f"--workers {self.workers}: must be at least 0")
        if self.last_batch not in get_args(LastBatch):
            raise UserError(
                f"--last-batch {self.last_batch}: must be one of {', '.join(get_args(LastBatch))}"
            )
