"""What must happen before `import mxnet`: versions, numpy aliases, threads, environment variables.

`import mxtrain` executes this module. It imports neither mxnet nor numpy: it puts a gate into the import
system, which does its work when somebody imports mxnet, be it this package, gluoncv or a user's own network
file. So `import mxtrain` and `--help` stay fast, and a version that cannot work gives one line and not a
traceback from inside MXNet.

MXNet reads OMP_NUM_THREADS once, when its library is loaded. Two OpenBLAS calls at the same time, each with
several OpenMP threads, spin for ever in MXNet 1.9.1, so several CPU contexts need one thread each. That is
the default here; `set_threads` changes it before the import; `check_contexts_safe` refuses what would hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path
from typing import Optional

from mxtrain.errors import UserError

MXNET_VERSION = "1.9.1"
NUMPY_RANGE = "1.19 to 1.26"

# What numpy 1.20 deprecated and 1.24 removed, and MXNet 1.9.1 reads at its import.
_NUMPY_ALIASES = {"bool": bool, "object": object, "int": int, "float": float, "str": str, "complex": complex}

# MXNet warns when the CUDA libraries are not those that it was compiled against. The pinned ones are newer on
# purpose: they run on today's GPUs.
_QUIET = {"MXNET_CUDA_LIB_CHECKING": "0", "MXNET_CUDNN_LIB_CHECKING": "0"}

# Each operator on a CPU may take one of so many workspaces, each of which stays as large as any has ever needed:
# MXNet's 4 hold several times the activations of a layer, and one thread per context makes no use of them.
_FRUGAL = {"MXNET_CPU_TEMP_COPY": "1"}

# Algorithms chosen by a rule, not by a race; no atomic additions; no fusion over the borders of segments.
_EXACT = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0", "MXNET_ENFORCE_DETERMINISM": "1", "MXNET_USE_FUSION": "0"}

_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # of malloc.h

_log = logging.getLogger("mxtrain")


class InstallError(UserError, ImportError):
    """A package that mxtrain needs is missing or of a version that cannot work.

    An ImportError too, for code that imports mxnet if it can.
    """


class _MXNetGate(importlib.abc.MetaPathFinder):
    """Checks versions and prepares numpy at the moment mxnet is imported; the usual finders then find it."""

    def find_spec(self, name, path=None, target=None):
        if name != "mxnet":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        _check_mxnet(_mxnet_version(spec) if spec else None, spec.origin if spec else None)
        _provide_distutils()
        _prepare_numpy()
        _threads_of_environment()
        return None


def threads() -> int:
    """OpenMP threads of one CPU operator: those that MXNet took when it was loaded, or else will take.

    Raises UserError for an OMP_NUM_THREADS that is no number from 1.
    """
    return _threads_of_library() if "mxnet" in sys.modules else _threads_of_environment()


def set_threads(n: int) -> None:
    """Make MXNet use `n` threads per CPU context. Call it before mxnet is imported.

    Raises UserError for n < 1, and when mxnet is already loaded with another number.
    """
    if n < 1:
        raise UserError(f"--threads {n}: at least 1 is needed")
    if "mxnet" in sys.modules and threads() != n:
        raise UserError(
            f"--threads {n}: MXNet is loaded already, with {threads()} threads, and cannot change it: "
            f"import mxtrain before mxnet, or set OMP_NUM_THREADS={n}"
        )
    os.environ["OMP_NUM_THREADS"] = str(n)


def check_contexts_safe(n_cpu_contexts: int) -> None:
    """Raise UserError when operators of `n_cpu_contexts` CPU contexts could deadlock in OpenBLAS.

    Each context has MXNET_CPU_WORKER_NTHREADS workers (1 unless set), and two that call OpenBLAS at once hang
    unless each has a single thread.
    """
    workers = _positive_int(os.environ.get("MXNET_CPU_WORKER_NTHREADS")) or 1
    if n_cpu_contexts * workers < 2 or threads() == 1:
        return
    what = f"{n_cpu_contexts} CPU contexts" if workers == 1 else f"MXNET_CPU_WORKER_NTHREADS={workers}"
    if "mxnet" in sys.modules:
        remedy = "import mxtrain before mxnet, with OMP_NUM_THREADS unset or 1"
    else:
        remedy = "use --threads 1 (OMP_NUM_THREADS=1)"
    raise UserError(f"{what} with {threads()} threads each would hang in OpenBLAS: {remedy}")


def set_exact() -> None:
    """Ask MXNet for deterministic GPU kernels (CPUs need none of it).

    Call it before the first network is built: MXNet reads these variables when it makes an operator.
    A variable that is set to something else is overruled, with a warning.
    """
    for name, value in _EXACT.items():
        before = os.environ.get(name, value)
        if before != value:
            _log.warning("%s=%s is overruled by --exact, which needs %s", name, before, value)
        os.environ[name] = value


def keep_memory() -> None:
    """Has the C library keep the memory of arrays on the CPU that are no longer used, for the next ones.

    MXNet asks for every array anew, and large ones would come from the system each time, page by page: an eighth of a
    step of ResNet-18. Does nothing where there is no glibc, nor where the environment chooses by MALLOC_... itself.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _install() -> None:
    for name, value in {**_QUIET, **_FRUGAL}.items():
        os.environ.setdefault(name, value)
    if "mxnet" in sys.modules:
        _check_mxnet(sys.modules["mxnet"].__version__, sys.modules["mxnet"].__file__)
        return
    if not os.environ.get("OMP_NUM_THREADS", "").strip():  # several CPU contexts are then safe
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.meta_path.insert(0, _MXNetGate())


def _mxnet_version(spec) -> Optional[str]:
    """The version that the package states; its distributions have many names (mxnet, mxnet-cu112, ...)."""
    for folder in spec.submodule_search_locations or []:
        source = Path(folder, "libinfo.py")
        if source.is_file():
            found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
            return found[1] if found else None
    return None


def _check_mxnet(version: Optional[str], where: Optional[str]) -> None:
    if version == MXNET_VERSION:
        return
    if version is not None:
        found = f"MXNet {version} does not work with mxtrain, which needs {MXNET_VERSION}"
    elif where is not None:
        found = f"{where} is imported as mxnet, but is not MXNet {MXNET_VERSION}"
    else:
        found = f"MXNet {MXNET_VERSION} is not installed in {sys.prefix}"
    raise InstallError(
        f"{found}: pip install mxnet=={MXNET_VERSION} (or mxnet-cu112=={MXNET_VERSION} for NVIDIA GPUs)"
    )


def _provide_distutils() -> None:
    # MXNet imports distutils, which Python 3.12 dropped. Setuptools puts its own copy in place when imported.
    if sys.version_info >= (3, 12) and importlib.util.find_spec("distutils") is None:
        try:
            import setuptools  # noqa: F401
        except ImportError:
            text = "MXNet needs distutils, which Python 3.12 lacks: pip install 'setuptools<81'"
            raise InstallError(text) from None


def _prepare_numpy() -> None:
    import numpy as np

    _check_numpy(np.__version__)
    for name, builtin in _NUMPY_ALIASES.items():
        # Not hasattr: between 1.20 and 1.26 it warns, and it may answer from a deprecation shim.
        if name not in vars(np):
            setattr(np, name, builtin)


def _check_numpy(version: str) -> None:
    major, minor = (int(part) for part in version.split(".")[:2])
    if not (1, 19) <= (major, minor) < (2, 0):
        raise InstallError(
            f"numpy {version} does not work with MXNet {MXNET_VERSION}, numpy {NUMPY_RANGE} do: "
            "pip install 'numpy>=1.19,<2'"
        )


def _threads_of_environment() -> int:
    # Anything but a number makes MXNet abort the process at its import, OpenMP's lists ("4,2") included.
    text = os.environ.get("OMP_NUM_THREADS", "")
    if _positive_int(text) is None:
        raise UserError(f"OMP_NUM_THREADS={text!r}: expected a number from 1")
    return _positive_int(text)


def _threads_of_library() -> int:
    """Asked of the loaded library, since the environment may have changed after it was loaded.

    Without OMP_NUM_THREADS, MXNet sets OpenMP to half the cores, while OpenBLAS keeps all: the larger counts.
    """
    import mxnet as mx

    library = ctypes.CDLL(mx.libinfo.find_lib_path()[0])
    counts = [library.omp_get_max_threads()]
    if hasattr(library, "openblas_get_num_threads"):  # not in a build against another BLAS
        counts.append(library.openblas_get_num_threads())
    return max(counts)


def _positive_int(text: Optional[str]) -> Optional[int]:
    """The number that `text` states, None where it states none that a C int holds."""
    found = re.fullmatch(r"\s*0*([1-9][0-9]{0,8})\s*", text or "")
    return int(found[1]) if found else None


_install()
