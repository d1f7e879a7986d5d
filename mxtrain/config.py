"""The command line and configuration files: every field of every settings dataclass is a flag and a YAML key.

Settings live in dataclasses beside the code that uses them; this module joins them. It imports no mxnet.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Container, Dict, List, NoReturn, Optional

import jsonargparse
import yaml
from docstring_parser import parse_from_object

from mxtrain.data.settings import DataConfig
from mxtrain.data.text_settings import TextConfig
from mxtrain.devices import DeviceConfig
from mxtrain.errors import UserError, nearest
from mxtrain.models.experts_settings import ExpertsConfig
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.models.settings import ModelConfig
from mxtrain.optim.settings import OptimConfig
from mxtrain.parallel.settings import ParallelConfig
from mxtrain.parallel.world import IN_PROCESS, started_together
from mxtrain.train.settings import TrainConfig

SECTIONS = {"train": TrainConfig, "data": DataConfig, "text": TextConfig, "model": ModelConfig, "gpt": GPTConfig,
            "experts": ExpertsConfig, "optim": OptimConfig, "parallel": ParallelConfig, "devices": DeviceConfig}

MACHINE = {"gpus", "cpus", "kvstore", "staleness", "recompute", "audit", "workers", "worker_kind", "out", "resume",
           "checkpoint_updates", "checkpoint_minutes", "keep", "tensorboard", "plots", "progress", "pretrained_root",
           "data", "data_root", "val", "dp", "tp", "pp", "cut", "pp_schedule", "trace", "zero"}
"""Fields that may differ at every start and must not change the result. (Data may have moved; their
fingerprint may not have changed.)"""

RENEWABLE = {"lr", "schedule", "warmup_epochs", "decay_epochs", "decay_factor", "poly_power", "final_lr", "epochs",
             "monitor", "patience", "min_delta", "on_bad_sample", "compression",
             "compression_threshold"}
"""Fields of the run that may be given anew when it goes on."""


class _Parser(jsonargparse.ArgumentParser):
    def error(self, message: str, ex=None) -> NoReturn:
        raise UserError(_in_our_words(self, " ".join(str(message).split())))


def parser(program: str, description: str) -> jsonargparse.ArgumentParser:
    """A parser without flags whose errors are UserErrors of one line."""
    return _Parser(prog=program, description=description, default_env=False, allow_abbrev=False,
                   print_config=None)


def training_parser() -> jsonargparse.ArgumentParser:
    """The parser of train.py."""
    result = parser("train.py", "Train a Gluon network; without flags, on scikit-learn's digits.")
    result.add_argument("--config", metavar="FILE", type=str, help="YAML file with any of the fields below; flags win.")
    result.add_argument("--json", action="store_true", help="Print one JSON object at the end.")
    result.add_argument("--check-data", action="store_true",
                        help="Read all samples once, tell what they are, as scripts/check_data.py does, and train "
                             "nothing.")
    result.add_argument("--plan", action="store_true",
                        help="Tell what the layout takes of every device, and which is too small; train nothing. The "
                             "devices need not be there.")
    result.add_argument("--processes", type=int, metavar="N", help="Processes that --plan is to plan for (default: 1).")
    result.add_argument("--device-memory", type=str, metavar="SIZE",
                        help="Memory of each device for --plan, such as 80GB (default: what the devices here have).")
    for section in SECTIONS.values():
        add_fields(result, section)
    return result


def add_fields(to: jsonargparse.ArgumentParser, section: type, only: Optional[Container[str]] = None) -> None:
    """Adds a flag for every field of a settings dataclass, or those named by `only`, as one group of the help."""
    group = to.add_argument_group(section.__name__.replace("Config", "").lower())
    for item in dataclasses.fields(section):
        if only is None or item.name in only:
            _add_field(group, item, typing.get_type_hints(section)[item.name], documentation(section)[item.name])


@functools.lru_cache(None)
def documentation(section: type) -> Dict[str, str]:
    """Field -> the sentence that follows it in the source."""
    return {p.arg_name: " ".join((p.description or "").split()) for p in parse_from_object(section).params}


def _add_field(group, item: dataclasses.Field, kind: Any, text: str) -> None:
    default = item.default_factory() if item.default is dataclasses.MISSING else item.default
    flag = "--" + item.name.replace("_", "-")
    if kind is bool:
        yes_no = jsonargparse.ActionYesNo(yes_prefix="", no_prefix="no-")
        group.add_argument(flag, action=yes_no, default=default, help=text)
    elif typing.get_origin(kind) is list:
        group.add_argument(flag, nargs="+", type=typing.get_args(kind)[0], default=default, help=text)
    else:
        group.add_argument(flag, type=kind, default=default, help=text)


def parse(argv: List[str]) -> SimpleNamespace:
    """What was given on the command line and in a file: `given` (field -> value), `json`, `check_data`, and for `plan`
    `processes` and `device_memory`."""
    values = vars(training_parser().parse_args(argv, defaults=False))
    as_json, check_data, plan = (bool(values.pop(name, False)) for name in ("json", "check_data", "plan"))
    processes, memory = values.pop("processes", None), values.pop("device_memory", None)
    for flag, value in (("--processes", processes), ("--device-memory", memory)):
        if value is not None and not plan:
            raise UserError(f"{flag} {value}: is for --plan; give both, or none")
    if processes is not None and processes < 1:
        raise UserError(f"--processes {processes}: must be 1 or more")
    if plan and check_data:
        raise UserError("--plan and --check-data: give one of them")
    file = values.pop("config", None)
    try:
        from_file = load(Path(file)) if file else {}
    except UserError as error:
        raise UserError(f"--config {error}") from None
    if from_file.get("kvstore") in IN_PROCESS and started_together():
        del from_file["kvstore"]  # of a run in one process: it does not say how several meet
    return SimpleNamespace(given={**from_file, **values}, json=as_json, check_data=check_data, plan=plan,
                           processes=processes or 1, device_memory=memory)


def build(values: Dict[str, Any]) -> SimpleNamespace:
    """One checked settings object per section, from field -> value; what is missing takes its default."""
    unknown = set(values) - set(field_names())
    if unknown:
        name = sorted(unknown)[0]
        raise UserError(f"{name}: no such setting; {nearest(name, field_names())}")
    return sections_of(values, SECTIONS)


def sections_of(values: Dict[str, Any], sections: Dict[str, type]) -> SimpleNamespace:
    """One checked settings object per section; values of other names are passed over."""
    for section in sections.values():
        for name, kind in typing.get_type_hints(section).items():
            if values.get(name, 0) is None and type(None) not in typing.get_args(kind):
                raise UserError(f"--{name.replace('_', '-')} null: must be {_allowed(kind)}")
    return SimpleNamespace(**{
        key: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
        for key, section in sections.items()})


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
    given = {name: value for name, value in given.items() if (name, value) != ("task", "auto")}
    if (given.get("micro_batch") or 0) > 0 and "shards" not in given:
        given["shards"] = -(-saved["batch_size"] // given.pop("micro_batch"))  # which is what it became
    for name, value in given.items():
        before = saved[name] if name in saved else _default(name)  # of a run from before there was such a setting
        if name not in MACHINE | RENEWABLE and value != before:
            raise UserError(f"--{name.replace('_', '-')} {value}: the run was started with {before}, "
                            "and this cannot change when it goes on")
    values = {**saved, **given}
    if "cpus" in given and "gpus" not in given:
        values["gpus"] = None
    if "gpus" in given and "cpus" not in given:
        values["cpus"] = None
    if given.get("schedule", "step") != "step" and "decay_epochs" not in given:
        values["decay_epochs"] = []  # of the schedule that is left
    if given.get("compression", "2bit") != "2bit" and "compression_threshold" not in given:
        values["compression_threshold"] = None  # of 2bit
    if given.get("pp", saved.get("pp")) != saved.get("pp") and "cut" not in given:
        values["cut"] = []  # of other stages
    return values


def _default(name: str) -> Any:
    """A field's value where nothing is said."""
    field = next(f for section in SECTIONS.values() for f in dataclasses.fields(section) if f.name == name)
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def load(path: Path) -> Dict[str, Any]:
    """The fields in a configuration file, checked one by one. Names may be written with dashes, as the flags."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a configuration file, which has lines like epochs: 3")
    try:
        return checked({str(name).replace("-", "_"): value for name, value in values.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def checked(values: Dict[str, Any]) -> Dict[str, Any]:
    """The same fields with values of the fields' types. Raises UserError for one that has no such value."""
    for section in SECTIONS.values():
        for name, kind in typing.get_type_hints(section).items():
            if kind is bool and not isinstance(values.get(name, True), bool):
                raise UserError(f"--{name.replace('_', '-')} {values[name]}: must be {_allowed(bool)}")
            if typing.get_origin(kind) is list and not isinstance(values.get(name, []), (list, tuple)):
                raise UserError(f"--{name.replace('_', '-')} {values[name]}: must be {_allowed(kind)}")
            whole = typing.get_origin(kind) is typing.Literal and isinstance(typing.get_args(kind)[0], int)
            if whole and type(values.get(name, 0)) is not int:
                raise UserError(f"--{name.replace('_', '-')} {values[name]}: must be {_allowed(kind)}")
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    parsed = vars(training_parser().parse_object(values, defaults=False))
    return {name: parsed[name] for name in values}


def save(path: Path, values: Dict[str, Any], notes: List[str] = ()) -> None:
    """Writes a config.yaml that `--config` and `--resume` read; notes become comments, after those there already."""
    path = Path(path)
    before = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    lines = [*before, *(f"# {note}" for note in notes), yaml.safe_dump(values, sort_keys=False, allow_unicode=True)]
    temporary = path.with_name(f".{path.name}")
    temporary.write_text("\n".join(lines))
    temporary.replace(path)


def _in_our_words(of: jsonargparse.ArgumentParser, message: str) -> str:
    """jsonargparse's message, where it is about a flag: which one, the value received, the values allowed."""
    flags = {action.dest: option for action in of._actions for option in action.option_strings[:1]}
    unknown = re.match(r"(?:[Uu]nrecognized arguments: |Option ')([^ =']+)", message)
    if unknown:
        name = unknown[1]
        if not name.startswith("-") and not message.startswith("Option"):
            takes = [action.dest for action in of._actions if not action.option_strings]
            return f"{name}: unexpected; " + (f"give all {takes[0]} in one place" if takes else "flags begin with --")
        return f"{name}: no such setting; {nearest(name, flags.values() if name.startswith('-') else flags)}"
    wrong = re.match(r'Parser key "(\w+)"', message)
    value = re.search(r"(?:Got|Given) value: (.*)$", message)
    if wrong and value and wrong[1] in flags:
        kind = next(action for action in of._actions if action.dest == wrong[1])._typehint
        return f"{flags[wrong[1]]} {value[1]}: must be {_allowed(kind)}"
    return re.sub(r'^argument (?=--)|^Parser key "(\w+)"', lambda found: flags.get(found[1], ""), message)


def _allowed(kind: Any) -> str:
    """What a type admits, in words."""
    inner = [_allowed(one) for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Union:
        return " or ".join(inner)
    if typing.get_origin(kind) is list:
        return f"a list, such as [3, 7], each of it {inner[0]}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))
