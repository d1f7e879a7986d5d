"""The settings of the data; importable without mxnet."""

from dataclasses import dataclass
from typing import Literal, Optional, Tuple, get_args

from mxtrain.errors import UserError

Augment = Literal["none", "flip", "shift", "shift-flip", "crop"]
LastBatch = Literal["keep", "drop"]
Shuffle = Literal["full", "block", "none"]
WorkerKind = Literal["auto", "thread", "process"]
OnBadSample = Literal["stop", "skip"]


@dataclass
class DataConfig:
    """Which samples a run trains and validates on, and how they are delivered."""

    data: str = "digits"
    """Samples: "digits" (built in); "synthetic" or "synthetic:IMAGES,HEIGHTxWIDTHxCHANNELS,CLASSES" (made up); a
    folder of images with one folder per class, or with train/ and val/ of such folders; a record file (.rec) or a
    folder with train.rec and val.rec; a list of images (.lst, or .csv and .tsv with columns for path and label);
    a table of texts (.csv, .tsv or .txt with columns for text and label); any text, for --task lm;
    numpy arrays (.npz, X.npy,Y.npy or a folder of .npy files); a folder with MNIST-style idx files; a CIFAR-10 or
    CIFAR-100 folder."""

    val: Optional[str] = None
    """Folder or file with the validation samples, of the same kind as the data (default: the data's own
    validation part)."""

    val_split: Optional[float] = None
    """Share of the training samples that is held out where there is no validation part, 0 for none (default:
    0.2 for "digits", else 0.1); the choice of samples is fixed and does not depend on the seed: of a text for
    --task lm it is the end."""

    data_root: Optional[str] = None
    """Folder that the paths in a list of images start from (default: the folder of the list)."""

    image_column: Optional[str] = None
    """Column of a list of images that holds the paths (default: the one called path, file, filename or image)."""

    label_column: Optional[str] = None
    """Column of a table that holds the labels (default: the one called label, class, category or target)."""

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

    color_jitter: float = 0.0
    """Random factors for brightness, contrast and saturation of training images, each of up to this much above
    or below 1: 0 to 1, 0.4 is usual for ImageNet."""

    hue: float = 0.0
    """Random change of the hue of training images, up to this part of a full turn: 0 to 0.5."""

    lighting: float = 0.0
    """Random color added to training images along the principal components of ImageNet's colors (PCA lighting):
    its deviation, 0 to 1, 0.1 is usual."""

    rand_augment: Optional[str] = None
    """RandAugment for training images, as N,M: N operations of magnitude M, 0 to 10; 2,9 is usual for
    ResNet-50."""

    random_erasing: float = 0.0
    """Probability that a random box of a training image is replaced by random pixels; 0.25 is usual."""

    shuffle: Shuffle = "full"
    """Order of an epoch: full (every order is possible), block (for slow disks: blocks of neighbors, mixed
    within a window of blocks) or none (that of the data)."""

    shuffle_block: int = 256
    """Neighboring samples of a block, for --shuffle block."""

    shuffle_window: int = 16
    """Blocks whose samples are mixed, for --shuffle block."""

    workers: Optional[int] = None
    """Workers of a process that read, decode and change samples ahead of the training, 0 for none (default: one per
    core, shared by the processes of a host, where there is something to do); never changes the samples."""

    worker_kind: WorkerKind = "auto"
    """What workers are: thread, process (for Python code that holds the interpreter's lock), or auto, which
    knows the built-in data."""

    on_bad_sample: OnBadSample = "stop"
    """What a sample that cannot be read does: stop (it is named and the training saved and ended) or skip (it
    is named, counted and left out)."""

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
        for flag, value, largest in (
            ("--color-jitter", self.color_jitter, 1),
            ("--hue", self.hue, 0.5),
            ("--lighting", self.lighting, 1),
            ("--random-erasing", self.random_erasing, 1),
        ):
            if not 0 <= value <= largest:
                raise UserError(f"{flag} {value}: must be from 0 to {largest}")
        if self.rand_augment is not None:
            operations_and_magnitude(self.rand_augment)
        if self.workers is not None and self.workers < 0:
            raise UserError(f"--workers {self.workers}: must be at least 0")
        if self.workers == 0 and self.worker_kind != "auto":
            raise UserError(f"--worker-kind {self.worker_kind} has no effect with --workers 0")
        for flag, size in (("--shuffle-block", self.shuffle_block), ("--shuffle-window", self.shuffle_window)):
            if size < 1:
                raise UserError(f"{flag} {size}: must be at least 1")
            if self.shuffle != "block" and size != getattr(DataConfig, flag[2:].replace("-", "_")):
                raise UserError(f"{flag} {size}: has no effect with --shuffle {self.shuffle}, only with block")
        for flag, value, allowed in (
            ("--last-batch", self.last_batch, LastBatch),
            ("--shuffle", self.shuffle, Shuffle),
            ("--worker-kind", self.worker_kind, WorkerKind),
            ("--on-bad-sample", self.on_bad_sample, OnBadSample),
        ):
            if value not in get_args(allowed):
                raise UserError(f"{flag} {value}: must be one of {', '.join(get_args(allowed))}")


def operations_and_magnitude(rand_augment: str) -> Tuple[int, int]:
    """What "N,M" says: the number of operations, at least 1, and their magnitude, 0 to 10."""
    count, comma, magnitude = (part.strip() for part in rand_augment.partition(","))
    if comma and all(part.isascii() and part.isdigit() for part in (count, magnitude)):
        if int(count) >= 1 and int(magnitude) <= 10:
            return int(count), int(magnitude)
    raise UserError(
        f"--rand-augment {rand_augment}: must be N,M (such as 2,9): N operations, at least 1, of magnitude M, 0 to 10"
    )
