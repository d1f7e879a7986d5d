"""Each case runs in a fresh interpreter: what compat does, it does once per process and before mxnet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxtrain import compat

ROOT = Path(compat.__file__).parents[1]
BUILTINS = ("bool", "object", "int", "float", "str", "complex")


def run(code, python_path=(), **environment):
    """Run `code` in a fresh interpreter without thread settings but `environment`'s; its standard output."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MXNET_CPU_WORKER_NTHREADS")}
    env["PYTHONPATH"] = os.pathsep.join(map(str, [*python_path, ROOT]))
    env.update(environment)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def package(folder, name, **files):
    """Make a package in `folder` that stands in for a real one of another version."""
    for file, text in files.items():
        path = folder / name / f"{file}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def message(code, **kwargs):
    """The text of the UserError that `code` raises."""
    body = "\n    ".join(code.splitlines())
    code = f"from mxtrain import UserError\ntry:\n    {body}\nexcept UserError as e:\n    print(e)"
    return run(code, **kwargs)


def test_import_is_light():
    code = "import sys, mxtrain\nprint([m for m in ('mxnet', 'numpy', 'jsonargparse') if m in sys.modules])"
    assert run(code) == "[]"


def test_unknown_attribute():
    import mxtrain

    assert "fit" in dir(mxtrain)
    with pytest.raises(AttributeError, match="nonsense"):
        mxtrain.nonsense


def test_mxnet_imports_without_warning_about_aliases():
    code = f"""
import warnings
warnings.simplefilter("error", FutureWarning)
import mxtrain
import mxnet as mx, numpy as np, builtins
assert all(getattr(np, name) is getattr(builtins, name) for name in {BUILTINS})
print(float(mx.nd.ones((2, 3)).sum().asscalar()))
"""
    assert run(code) == "6.0"


def test_an_alias_that_numpy_has_is_left_alone():
    code = "import mxtrain, numpy as np\nnp.bool = 'mine'\nmxtrain.compat._prepare_numpy()\nprint(np.bool)"
    assert run(code) == "mine"


@pytest.mark.parametrize("version", ["2.0.0", "2.3.1rc1", "1.18.5"])
def test_numpy_that_cannot_work(tmp_path, version):
    package(tmp_path, "numpy", __init__=f"__version__ = '{version}'")
    text = message("import mxtrain.compat\nimport mxnet", python_path=[tmp_path])
    assert f"numpy {version} does not work" in text and "1.19 to 1.26" in text and "\n" not in text


@pytest.mark.parametrize("version", ["1.19.0", "1.23.5", "1.26.4", "1.26.0rc1"])
def test_numpy_that_can_work(version):
    compat._check_numpy(version)


def test_other_mxnet_is_refused_before_its_import(tmp_path):
    package(tmp_path, "mxnet", __init__="print('imported')", libinfo='__version__ = "2.0.0b1"\n')
    text = message("import mxnet", python_path=[tmp_path])
    assert text.startswith("MXNet 2.0.0b1 does not work with mxtrain, which needs 1.9.1") and "\n" not in text


def test_other_mxnet_is_refused_after_its_import():
    code = """
import sys, types
sys.modules["mxnet"] = mxnet = types.ModuleType("mxnet")
mxnet.__version__, mxnet.__file__ = "1.5.0", "x"
try:
    import mxtrain
except ImportError as e:
    print(e)
"""
    assert run(code).startswith("MXNet 1.5.0 does not work")


def test_a_file_that_hides_mxnet_is_named(tmp_path):
    (tmp_path / "mxnet.py").write_text("")
    text = message("import mxnet", python_path=[tmp_path])
    assert f"{tmp_path / 'mxnet.py'} is imported as mxnet, but is not MXNet 1.9.1" in text


def test_missing_mxnet_is_one_line_and_an_import_error():
    code = """
import sys, mxtrain
sys.path = [p for p in sys.path if 'site-packages' not in p]
try:
    import mxnet
except ImportError as e:
    print(isinstance(e, mxtrain.UserError), e)
"""
    text = run(code)
    assert text.startswith("True MXNet 1.9.1 is not installed in") and "pip install mxnet==1.9.1" in text


@pytest.mark.skipif(sys.version_info < (3, 12), reason="older Pythons have distutils")
def test_distutils_is_provided():
    # Without the hook that setuptools puts into site-packages, as in a virtual environment of other making.
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "istutils" not in str(finder)]
sys.modules.pop("_distutils_hack", None)
import mxtrain, mxnet
from distutils.version import LooseVersion
print("ok")
"""
    assert run(code) == "ok"


@pytest.mark.parametrize("given, expected", [(None, 1), ("", 1), ("1", 1), ("3", 3), (" 4 ", 4)])
def test_threads_before_and_after_the_import(given, expected):
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    code = "from mxtrain import compat\nprint(compat.threads())\nimport mxnet\nprint(compat.threads())"
    assert run(code, **environment).split() == [str(expected)] * 2


@pytest.mark.parametrize("nonsense", ["many", "0", "-2", "1.5", "4,2", "99999999999"])
def test_thread_count_that_would_abort_mxnet(nonsense):
    text = message("import mxnet", OMP_NUM_THREADS=nonsense)
    assert text.startswith(f"OMP_NUM_THREADS='{nonsense}': expected a number from 1")


def test_set_threads_is_what_mxnet_takes():
    code = """
from mxtrain import compat
compat.set_threads(3)
import mxnet
compat.set_threads(3)
print(compat.threads())
"""
    assert run(code, OMP_NUM_THREADS="2") == "3"


def test_set_threads_after_the_import_is_refused():
    text = message("from mxtrain import compat\nimport mxnet\ncompat.set_threads(2)")
    assert text.startswith("--threads 2: MXNet is loaded already, with 1 threads")


@pytest.mark.parametrize("n", [0, -1])
def test_set_threads_below_one(n):
    with pytest.raises(compat.UserError, match=f"--threads {n}"):
        compat.set_threads(n)


def test_contexts_that_are_safe(monkeypatch):
    monkeypatch.setattr(compat, "threads", lambda: 1)
    compat.check_contexts_safe(8)
    monkeypatch.setattr(compat, "threads", lambda: 4)
    compat.check_contexts_safe(1)
    compat.check_contexts_safe(0)


@pytest.mark.parametrize(
    "contexts, workers, what",
    [(2, None, "2 CPU contexts"), (1, "2", "MXNET_CPU_WORKER_NTHREADS=2")],
)
def test_contexts_that_would_hang(monkeypatch, contexts, workers, what):
    monkeypatch.setattr(compat, "threads", lambda: 4)
    if workers:
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", workers)
    with pytest.raises(compat.UserError, match=f"{what} with 4 threads each would hang"):
        compat.check_contexts_safe(contexts)


@pytest.mark.parametrize("threads", ["2", None])
def test_mxnet_imported_first_with_more_threads_is_refused(threads):
    if threads is None and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core: OpenBLAS has one thread anyway")
    # The aliases are what a user without mxtrain sets by hand.
    code = f"""
import builtins, numpy
for name in {BUILTINS}:
    setattr(numpy, name, getattr(builtins, name))
import mxnet
from mxtrain import compat
compat.check_contexts_safe(1)
try:
    compat.check_contexts_safe(2)
except compat.UserError as e:
    print(e)
"""
    assert "import mxtrain before mxnet" in run(code, **({"OMP_NUM_THREADS": threads} if threads else {}))


@pytest.mark.parametrize("contexts, workers", [(2, 1), (1, 2)])
def test_default_threads_do_not_hang(contexts, workers):
    # With OMP_NUM_THREADS=2 either case spins for ever in MXNet 1.9.1: the reason for all of this.
    code = f"""
import mxtrain, mxnet as mx
xs = [mx.nd.ones((300, 300), ctx=mx.cpu(i % {contexts})) for i in range(2)]
for _ in range(300):
    ys = [mx.nd.dot(x, x) for x in xs]
mx.nd.waitall()
print(ys[1][0, 0].asscalar())
"""
    assert run(code, MXNET_CPU_WORKER_NTHREADS=str(workers)) == "300.0"


def test_set_exact_overrules_and_says_so(monkeypatch, caplog):
    for name in compat._EXACT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    with caplog.at_level("WARNING", "mxtrain"):
        compat.set_exact()
    assert {name: os.environ[name] for name in compat._EXACT} == compat._EXACT
    assert caplog.messages == ["MXNET_USE_FUSION=1 is overruled by --exact, which needs 0"]


def test_a_users_own_environment_wins():
    code = "import os, mxtrain\nfor name in mxtrain.compat._QUIET: print(name, os.environ[name])"
    expected = ["MXNET_CUDA_LIB_CHECKING 0", "MXNET_CUDNN_LIB_CHECKING 1"]
    assert run(code, MXNET_CUDNN_LIB_CHECKING="1").splitlines() == expected


MALLOCS = """
import ctypes, resource
from mxtrain import compat

compat.keep_memory()
libc, size = ctypes.CDLL(None), 64 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def use():
    memory = libc.malloc(size)
    libc.memset(memory, 1, size)
    libc.free(memory)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("chosen, kept", [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_memory_that_was_used_is_kept(chosen, kept):
    """64 MB are 16,384 pages, or 32 large ones, which the system gives out one by one."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    said = subprocess.run([sys.executable, "-c", MALLOCS], env={**environment, **chosen}, capture_output=True, text=True)
    assert (int(said.stdout) < 20) == kept, said
