"""What a run folder says about its network's input and output; importable without mxnet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List, NamedTuple

from mxtrain.errors import UserError
from mxtrain.train import checkpoint, folder


class Description(NamedTuple):
    """The classes of a network by output, what kind of data it takes, and how these become its input."""

    classes: List[str]
    kind: str
    """image, text or lm."""
    values: dict
    """The fields of tasks.pixels.Pixels, tasks.text.Words or tasks.language.Sequences."""


def read(place: Path) -> Description:
    """From classes.txt and input.json of a run folder. Raises UserError when there are none."""
    for name in ("classes.txt", "input.json"):
        if not (place / name).is_file():
            raise UserError(f"{place}: has no {name}; only runs of train.py, which makes the network itself, can "
                            "be opened")
    try:
        values = json.loads((place / "input.json").read_text(encoding="utf-8"))
        # Runs made before there were texts do not say the kind.
        return Description(folder.read_classes(place), values.pop("kind", "image"), values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise unreadable(place, error) from None


def refuse_language(run: str) -> None:
    """Raises UserError for a run, as --run names it, of a language model."""
    if read(checkpoint.find(run)[0]).kind == "lm":
        raise UserError(f"--run {run}: is a language model, which goes on with texts: python scripts/generate.py "
                        f"--run {run} --prompt ...")


def unreadable(place: Path, error: Exception) -> UserError:
    return UserError(f"{place}: classes.txt or input.json cannot be read ({error})")
