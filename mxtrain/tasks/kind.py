"""What is learned, worked out from the data before anything heavy is imported, and the task for it."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Container

from mxtrain.data.settings import DataConfig
from mxtrain.data.table import EXTENSIONS, IMAGE_COLUMNS, TEXT_COLUMNS, has_column, is_prose, read_columns
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import UserError
from mxtrain.models.experts_settings import ExpertsConfig
from mxtrain.models.gpt_settings import GPTConfig

_FOR_TEXTS = {"data", "val", "val_split", "label_column", "shuffle", "shuffle_block", "shuffle_window", "workers",
              "worker_kind", "on_bad_sample", "last_batch"}
"""Fields of DataConfig that mean something for texts; the others are about images."""

_FOR_LANGUAGE = _FOR_TEXTS - {"label_column", "on_bad_sample"}


def resolve(settings: SimpleNamespace) -> str:
    """"image", "text" or "lm". Raises UserError when the data do not say, and for settings of another task."""
    kind = settings.train.task
    if kind == "auto":
        kind = _of_file(settings) if _is_table(settings.data.data) else "image"
    if kind == "text":
        _refuse(settings.data, DataConfig, _FOR_TEXTS, "texts (--task text)")
        _refuse_gpt(settings, "texts (--task text)")
    elif kind == "lm":
        _refuse(settings.data, DataConfig, _FOR_LANGUAGE, "language (--task lm)")
        _refuse(settings.text, TextConfig, set(), "language (--task lm)")
        if settings.train.label_smoothing:
            raise UserError(f"--label-smoothing {settings.train.label_smoothing}: has no effect on language "
                            "(--task lm)")
        if settings.model.model not in (None, "gpt"):
            _refuse_gpt(settings, f"--model {settings.model.model}, only on gpt", {"context"})
    else:
        _refuse(settings.text, TextConfig, set(), "images (--task image)")
        _refuse_gpt(settings, "images (--task image)")
        return kind
    if settings.model.pretrained or settings.model.zero_gamma:
        flag = "--pretrained" if settings.model.pretrained else "--zero-gamma"
        raise UserError(f"{flag}: is for networks of images; these are texts (--task {kind})")
    if settings.data.data == DataConfig.data and not os.path.exists(DataConfig.data):
        needed = f"a table of texts ({', '.join(EXTENSIONS)})" if kind == "text" else "a text file"
        raise UserError(f"--data is missing: --task {kind} needs {needed}")
    return kind


def open_task(settings: SimpleNamespace, resumed: bool, *part):
    """The task that settings.train.task names; see tasks.image.ImageTask. Imports mxnet."""
    if settings.train.task == "text":
        from mxtrain.tasks.text import TextTask as Task
    elif settings.train.task == "lm":
        from mxtrain.tasks.language import LanguageTask as Task
    else:
        from mxtrain.tasks.image import ImageTask as Task
    return Task(settings, resumed, *part)


def _is_table(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS) and os.path.isfile(os.path.expanduser(path))


def _of_file(settings: SimpleNamespace) -> str:
    if settings.text.text_column is not None:
        return "text"
    if settings.data.image_column is not None:
        return "image"
    path = settings.data.data
    if settings.data.label_column is None and path.lower().endswith(".txt") and is_prose(os.path.expanduser(path)):
        return "lm"
    columns = read_columns(os.path.expanduser(path), settings.text.encoding)
    text, image = has_column(columns, TEXT_COLUMNS), has_column(columns, IMAGE_COLUMNS)
    if text != image:
        return "text" if text else "image"
    what = "both texts and images" if text else "neither texts nor images"
    shown = ", ".join(repr(name[:30]) for name in columns[:10]) + (", ..." if len(columns) > 10 else "")
    raise UserError(f"--data {path}: {what} by the names of its columns, {shown}: --task says which; --text-column, "
                    "--image-column and --label-column name the columns (if the first line is a row already, add one "
                    "above it that names the columns)")


def _refuse_gpt(settings: SimpleNamespace, things: str, meant: Container[str] = ()) -> None:
    _refuse(settings.gpt, GPTConfig, meant, things)
    _refuse(settings.experts, ExpertsConfig, (), things)


def _refuse(section, kind: type, meant: Container[str], things: str) -> None:
    """Raises UserError for a setting that has no effect."""
    for field in dataclasses.fields(kind):
        value = getattr(section, field.name)
        if field.name not in meant and value != field.default:
            raise UserError(f"--{field.name.replace('_', '-')} {value}: has no effect on {things}")
