"""The command line and configuration files: every field of every settings dataclass is a flag and a YAML key.

Settings live in dataclasses beside the code that uses them; this module joins them. It imports no mxnet.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, NoReturn

import jsonargparse
import yaml
from docstring_parser import parse_from_object

from mxtrain.data.settings import DataConfig
from mxtrain.devices import DeviceConfig
from mxtrain.errors import UserError, nearest
from mxtrain.models.settings import ModelConfig
from mxtrain.optim.settings import OptimConfig
from mxtrain.parallel.settings import ParallelConfig
from mxtrain.train.settings import TrainConfig

SECTIONS = {"train": TrainConfig, "data": DataConfig, "model": ModelConfig, "optim": OptimConfig,
            "parallel": ParallelConfig, "devices": DeviceConfig}

MACHINE = {"gpus", "cpus", "kvstore", "recompute", "workers", "out", "resume", "checkpoint_updates",
           "checkpoint_minutes", "keep", "tensorboard", "plots", "progress", "pretrained_root", "data", "val"}
"""Fields that may differ at every start and must not change the result. (Data may have moved; their
fingerprint may not have changed.)"""

RENEWABLE = {"lr", "schedule", "warmup_epochs", "decay_epochs", "decay_factor", "poly_power", "final_lr", "epochs",
             "monitor", "patience", "min_delta"}
"""Fields of the run that may be given anew when it goes on."""


class _Parser(jsonargparse.ArgumentParser):
    def error(self, message: str, ex=None) -> NoReturn:
        raise UserError(_one_line(str(message)))


def parser(program: str, description: str) -> jsonargparse.ArgumentParser:
    """A parser without flags whose errors are UserErrors."""
    return _Parser(prog=program, description=description, default_env=False)


def training_parser() -> jsonargparse.ArgumentParser:
    """The parser of train.py."""
    result = parser("train.py", "Train a Gluon network; without flags, on scikit-learn's digits.")
    result.add_argument("--config", action="config", help="YAML file with any of the fields below; flags win.")
    result.add_argument("--json", action="store_true", help="Print one JSON object at the end.")
    for section in SECTIONS.values():
        group = result.add_argument_group(section.__name__.replace("Config", "").lower())
        for item in dataclasses.fields(section):
            _add_field(group, item, typing.get_type_hints(section)[item.name], documentation(section)[item.name])
    return result


@functools.lru_cache(None)
def documentation(section: type) -> Dict[str, str]:
    """Field -> the sentence that follows it in the source."""
    return {p.arg_name: " ".join((p.description or "").split()) for p in parse_from_object(section).params}


def _add_field(group, item: dataclasses.Field, kind: Any, text: str) -> None:
    default = item.default_factory() if item.default is dataclasses.MISSING else item.default
    flag = "--" + item.name.replace("_", "-")
    if kind is bool:
        group.add_argument(flag, action=jsonargparse.ActionYesNo(yes_prefix="", no_prefix="no-"), default=default, help=text)
    elif typing.get_origin(kind) is list:
        group.add_argument(flag, nargs="+", type=typing.get_args(kind)[0], default=default, help=text)
    else:
        group.add_argument(flag, type=kind, default=default, help=text)


def parse(argv: List[str]) -> SimpleNamespace:
    """What was given on the command line and in files: `given` (field -> value) and `json`."""
    values = vars(training_parser().parse_args(argv, defaults=False))
    as_json = bool(values.pop("json", False))
    values.pop("config", None)
    return SimpleNamespace(given=values, json=as_json)


def build(values: Dict[str, Any]) -> SimpleNamespace:
    """One checked settings object per section, from field -> value; what is missing takes its default."""
    unknown = set(values) - set(field_names())
    if unknown:
        name = sorted(unknown)[0]
        raise UserError(f"{name}: no such setting; {nearest(name, field_names())}")
    return SimpleNamespace(**{
        key: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
        for key, section in SECTIONS.items()})


@functools.lru_cache(None)
def field_names() -> tuple:
    return tuple(f.name for section in SECTIONS.values() for f in dataclasses.fields(section))


def flatten(settings: SimpleNamespace) -> Dict[str, Any]:
    """The opposite of build."""
    return {f.name: getattr(getattr(settings, key), f.name)
            for key, section in SECTIONS.items() for f in dataclasses.fields(section)}


def resume_values(saved: Dict[str, Any], given: Dict[str, Any]) -> Dict[str, Any]:
    """The fields of a run that goes on: the saved ones, with those given now.

    Raises UserError, with both values, for a field that belongs to the run and differs.
    """
    for name, value in given.items():
        if name not in MACHINE | RENEWABLE and value != saved.get(name):
            raise UserError(f"--{name.replace('_', '-')} {value}: the run was started with {saved.get(name)}, "
                            "and this cannot change when it goes on")
    values = {**saved, **given}
    if "cpus" in given and "gpus" not in given:
        values["gpus"] = None
    if "gpus" in given and "cpus" not in given:
        values["cpus"] = None
    return values


def load(path: Path) -> Dict[str, Any]:
    """The fields in a run's config.yaml."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({_one_line(str(error))})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a configuration file")
    return values


def save(path: Path, values: Dict[str, Any], notes: List[str] = ()) -> None:
    """Writes a config.yaml that `--config` and `--resume` read; notes become comments, after those there already."""
    path = Path(path)
    before = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    lines = [*before, *(f"# {note}" for note in notes), yaml.safe_dump(values, sort_keys=False, allow_unicode=True)]
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("\n".join(lines))
    temporary.replace(path)


def _one_line(message: str) -> str:
    """jsonargparse's message without its line breaks, and with the flag that was probably meant."""
    text = " ".join(message.split())
    for start in ("unrecognized arguments: ", "Unrecognized arguments: "):
        if text.startswith(start):
            flag = text[len(start):].split()[0].split("=")[0]
            known = ["--" + name.replace("_", "-") for name in field_names()]
            return f"{flag}: no such flag; {nearest(flag, known)}"
    return text


if __name__ == "__main__":
    training_parser().parse_args(sys.argv[1:])
