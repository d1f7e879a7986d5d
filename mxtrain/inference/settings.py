"""Settings of evaluate.py, predict.py, export.py and generate.py; importable without mxnet."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import List, Literal, Optional

from mxtrain.data.text_settings import check_encoding
from mxtrain.errors import UserError


@dataclass
class RunConfig:
    """The trained network."""

    run: Optional[str] = None
    """Run folder of train.py, or one of its checkpoints."""
    checkpoint: Optional[str] = None
    """Which checkpoint of the run folder: best, latest, or the name of one (default: best)."""

    def __post_init__(self):
        if not self.run:
            raise UserError("--run is missing: give a run folder of train.py, or one of its checkpoints")


@dataclass
class BatchConfig:
    """How images and texts reach the network; changes nothing but the speed and the memory in use."""

    batch_size: int = 64
    """Images or texts of a batch, over all devices."""
    workers: Optional[int] = None
    """Threads that read and decode ahead, 0 for none (default: one per core)."""

    def __post_init__(self):
        if self.batch_size < 1:
            raise UserError(f"--batch-size {self.batch_size}: must be 1 or more")
        if self.workers is not None and self.workers < 0:
            raise UserError(f"--workers {self.workers}: must be 0 or more")


@dataclass
class EvaluateConfig:
    """What is evaluated, and what is told."""

    data: Optional[str] = None
    """Samples, as for train.py: their validation part where they have one, else all of them; of a text for a language
    model, all of it (default: the run's own validation samples)."""
    text_column: Optional[str] = None
    """Column of --data with the texts (default: the one of the run's name, else one called text or the like)."""
    label_column: Optional[str] = None
    """Column of --data with the labels (default: likewise)."""
    encoding: Optional[str] = None
    """Encoding of --data, where it is a table of texts (default: that of the run)."""
    image_column: Optional[str] = None
    """Column of --data with the paths of images (default: the one called image, path, file or the like)."""
    data_root: Optional[str] = None
    """Folder that the paths in a list of images start from (default: the folder of the list)."""
    on_bad_sample: Optional[Literal["stop", "skip"]] = None
    """What an image that cannot be read does: stop, or skip (it is named, counted and left out); default: as in the
    run's training."""
    per_class: bool = False
    """Tell the accuracy of each class; of texts also precision, recall and F1."""
    confusion: Optional[str] = None
    """CSV file to write: for each true class (rows) how often which class (columns) was predicted."""

    def __post_init__(self):
        if self.encoding is not None:
            check_encoding(self.encoding)
        if self.confusion is not None:
            check_writable("--confusion", self.confusion)


@dataclass
class PredictConfig:
    """What is classified besides files, and what is told."""

    text: List[str] = field(default_factory=list)
    """Texts to classify, for a run that was trained on texts."""
    text_column: Optional[str] = None
    """Column of the table with the texts (default: the one of the run's name, else one called text or the like)."""
    encoding: Optional[str] = None
    """Encoding of the table of texts (default: that of the run)."""
    top: int = 1
    """Number of likeliest classes to list."""
    out: Optional[str] = None
    """File to write, .csv or .json (default: CSV to the standard output)."""

    def __post_init__(self):
        if self.top < 1:
            raise UserError(f"--top {self.top}: must be 1 or more")
        if self.encoding is not None:
            check_encoding(self.encoding)
        if self.out is not None:
            if Path(self.out).suffix.lower() not in (".csv", ".json"):
                raise UserError(f"--out {self.out}: must end in .csv or .json")
            check_writable("--out", self.out)


@dataclass
class ExportConfig:
    """What is written."""

    out: Optional[str] = None
    """Beginning of the files' names: models/net gives models/net-symbol.json, models/net-0000.params, ..."""
    format: Literal["symbol", "onnx"] = "symbol"
    """MXNet's symbol and parameters, or ONNX."""

    def __post_init__(self):
        if not self.out or self.out.endswith("/") or Path(self.out).is_dir():
            given = f"--out {self.out}" if self.out else "--out is missing"
            raise UserError(f"{given}: give the beginning of the files' names, such as exported/net")


@dataclass
class GenerateConfig:
    """What a language model writes."""

    prompt: Optional[str] = None
    """Text to go on with (default: what comes from the standard input)."""
    length: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """What the scores are divided by: 0 takes the likeliest token each time, 1 draws from the model's own distribution,
    more is wilder."""
    top_k: Optional[int] = None
    """Draw only from so many of the likeliest tokens (default: from all)."""
    seed: int = 0
    """Seed of the draws: the same one gives the same text."""

    def __post_init__(self):
        if self.length < 1:
            raise UserError(f"--length {self.length}: must be 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature}: must be a number from 0 on")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k}: must be 1 or more")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")
        if self.temperature == 0 and self.top_k is not None:
            raise UserError(f"--top-k {self.top_k}: has no effect with --temperature 0, which takes the likeliest")


def check_writable(flag: str, path: str) -> None:
    """Raises UserError for a file that could not be written after all the work is done."""
    if Path(path).is_dir():
        raise UserError(f"{flag} {path}: is a folder; give the name of a file")
    if not Path(path).parent.is_dir():
        raise UserError(f"{flag} {path}: the folder {Path(path).parent} does not exist")
