"""--gpus, --cpus and --threads -> the list of contexts to train on, checked before any data is read."""

import logging
import os
import re
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple, Union

from mxtrain import compat
from mxtrain.errors import UserError

_log = logging.getLogger("mxtrain")


@dataclass
class DeviceConfig:
    """The devices of this process."""

    gpus: Optional[Union[str, int]] = None  # int: what YAML makes of `gpus: 0`
    """GPUs to use: their ids, such as 0,1, or all. Several processes of a host share the list equally.
    Without it: GPU 0, or that of the local rank, where there is one, else the CPU."""
    cpus: Optional[int] = None
    """CPU contexts to use instead of GPUs; several give the semantics of several devices, but no speed."""
    threads: Optional[int] = None
    """Threads per CPU context, 1 where there are several contexts; without it OMP_NUM_THREADS, else 1."""

    def __post_init__(self):
        if self.gpus is not None:
            self.gpus = str(self.gpus)
            parse_gpus(self.gpus)
        if self.cpus is not None and self.cpus < 1:
            raise UserError(f"--cpus {self.cpus}: at least 1 is needed")
        if self.gpus is not None and self.cpus is not None:
            raise UserError(f"--gpus {self.gpus!r} and --cpus {self.cpus} exclude each other: give one")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads {self.threads}: at least 1 is needed")


def parse_gpus(text: str) -> Optional[List[int]]:
    """The ids that a --gpus value names, in its order; None for "all". Imports no mxnet.

    Raises UserError for anything that is not "all" or a list of different ids with commas between them.
    """
    if text.strip().lower() == "all":
        return None
    if not text.strip():
        raise UserError("--gpus is empty: give GPU ids such as 0,1, or all (--cpus 1 trains on the CPU)")
    ids = []
    for item in text.split(","):
        item = item.strip()
        if not re.fullmatch("[0-9]+", item):
            raise UserError(f"--gpus {text!r}: {item!r} is not a GPU id; expected ids such as 0,1, or all")
        if int(item) in ids:
            raise UserError(f"--gpus {text!r}: GPU {int(item)} is named twice; each GPU can be used once")
        ids.append(int(item))
    return ids


def visible_gpus() -> Tuple[int, str]:
    """Number of GPUs that MXNet can use and, where it is 0, the reason."""
    import mxnet as mx

    if not mx.runtime.Features().is_enabled("CUDA"):
        return 0, "this MXNet is built for CPUs only, mxnet-cu112 is the build for NVIDIA GPUs"
    try:
        count = mx.context.num_gpus()
    except mx.base.MXNetError as error:  # no driver, or one too old; the rest of the message is a stack trace
        return 0, str(error).strip().splitlines()[-1].strip()
    return count, "" if count else "see nvidia-smi"


def contexts(config: DeviceConfig, probe: Callable[[], Tuple[int, str]] = visible_gpus, local_rank: int = 0,
             local_size: int = 1):
    """The contexts that `config` asks for: list of mx.Context, in the order given.

    local_rank, local_size: number of this process among those of its host, which share the GPUs of `config`: each takes
    an equal slice of the list, and without a list one GPU. `probe` tells the number of visible GPUs and why there are
    none. Raises UserError for GPUs that are not visible, and for CPU contexts that would hang
    (compat.check_contexts_safe). Needs no data: call it first.
    """
    if config.cpus is not None:
        return _cpus(config.cpus, "chosen by --cpus")
    count, reason = probe()
    if config.gpus is None:
        if not count:
            return _cpus(1, "no GPU is visible")
        if local_rank >= count:
            raise UserError(f"{local_size} processes on this host, but {_visible(count)}: start fewer, or give "
                            "--cpus 1")
        return _gpus([local_rank], f"{_visible(count)}, --gpus chooses")
    asked = parse_gpus(config.gpus)
    ids = list(range(count)) if asked is None else asked
    missing = ", ".join(str(i) for i in ids if i >= count)
    if missing or not ids:
        lacking = f"no GPU {missing}" if missing else "no GPU"
        raise UserError(f"--gpus {config.gpus!r}: there is {lacking}, {_visible(count, reason)}")
    if len(ids) % local_size:
        raise UserError(f"--gpus {config.gpus!r}: {len(ids)} GPUs cannot be shared equally by the {local_size} "
                        "processes of this host")
    share = len(ids) // local_size
    return _gpus(ids[local_rank * share:(local_rank + 1) * share], _visible(count))


def _visible(count: int, reason: str = "") -> str:
    """How many GPUs are visible, as part of a sentence."""
    text = f"{count} {'GPU is' if count == 1 else 'GPUs are'} visible"
    if count > 1:
        text += f" (0 to {count - 1})"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        text += f" with CUDA_VISIBLE_DEVICES={mask}"
    return f"{text}: {reason}" if reason else text


def _cpus(count: int, why: str):
    compat.check_contexts_safe(count)
    import mxnet as mx

    found = [mx.cpu(i) for i in range(count)]
    _log.info("devices: %s, threads per context %d; %s", ", ".join(map(str, found)), compat.threads(), why)
    return found


def _gpus(ids: List[int], why: str):
    import mxnet as mx

    found = [mx.gpu(i) for i in ids]
    _log.info("devices: %s; %s", ", ".join(map(str, found)), why)
    return found
