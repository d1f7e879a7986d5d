"""setup.py, the constraints files and the Makefile agree; a set-up that cannot work says so in one line."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.9", "3.10", "3.11", "3.12")
SHELL = shutil.which("sh")

# Horovod's files that docker/build-horovod.sh changes: the line in question, and what becomes of it.
PATCHES = {
    "cmake/Modules/FindMxnet.cmake": ("import mxnet as mx", "import mxtrain, mxnet as mx"),
    "horovod/mxnet/__init__.py": (
        "from horovod.a import b",
        "import mxtrain  # before MXNet: it prepares numpy\nfrom horovod.a import b",
    ),
    "third_party/gloo/gloo/transport/tcp/pair.cc": (
        "#include <sstream>\n  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n    return;\n  }\n"
        "  return;",
        "#include <thread>\n#include <sstream>\n  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n"
        "    std::this_thread::sleep_for(std::chrono::microseconds(50));\n    return;\n  }\n  return;"),
    "horovod/common/gloo/gloo_controller.cc": ("global_ranks_.reserve(size_);", "global_ranks_.resize(size_);"),
    "horovod/common/gloo/gloo_context.cc": (
        "GlooContext::Initialize() {\n  attr.iface = gloo_iface_;\n}\nGlooContext::InitializeForProcessSet(\n"
        "  attr.iface = gloo_iface_;\n}",
        "GlooContext::Initialize() {\n  attr.iface = gloo_iface_;\n}\nGlooContext::InitializeForProcessSet(\n"
        "  attr.iface = global_context.gloo_iface_;\n}"),
    "horovod/common/process_set.cc": (
        "void ProcessSetTable::Finalize_() {\n      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);\n}",
        "void ProcessSetTable::Finalize_() {\n      try {\n"
        "        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);\n"
        "      } catch (const std::exception&) {\n        id_to_process_set_[id].Finalize(status);\n"
        "        DeregisterProcessSet(id);\n        id_to_be_removed_ = SUCCESSFUL_REMOVAL;\n      }\n}"),
    "setup.py": ("else 'RelWithDebInfo'", "else 'Release'"),
    "CMakeLists.txt": ("    enable_language(CUDA)\nelse", "else"),
}


def requirements(lines):
    stripped = (line.split("#")[0].strip() for line in lines)
    return [Requirement(line) for line in stripped if line]


def locked(python, *files):
    """{name in lower case: version} of the constraints files under a version of Python."""
    lines = [line for file in files for line in (ROOT / "docker" / file).read_text().splitlines()]
    chosen = [r for r in requirements(lines) if applies(r, python)]
    return {r.name.lower(): str(r.specifier).replace("==", "") for r in chosen}


def applies(requirement, python):
    environment = {**default_environment(), "python_version": python}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.fixture(scope="module")
def package():
    """The arguments that setup.py gives to setuptools.setup."""
    given = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return given


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "docker").glob("constraints*.txt")))
def test_constraints_are_exact_versions(file):
    listed = requirements((ROOT / "docker" / file).read_text().splitlines())
    assert listed
    for requirement in listed:
        assert [s.operator for s in requirement.specifier] == ["=="], requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_satisfy_the_package(package, python):
    versions = locked(python, "constraints.txt", "constraints-test.txt", "constraints-horovod.txt")
    extras = package["extras_require"]
    needed = package["install_requires"] + extras["cpu"] + extras["onnx"] + extras["horovod"] + extras["test"]
    needed = requirements(needed)
    for requirement in needed:
        if applies(requirement, python):
            assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_one_opencv_and_one_mxnet(package):
    # Two distributions with the same files overwrite each other.
    versions = locked("3.11", "constraints.txt")
    builds = [name for name in versions if name.startswith(("opencv", "mxnet"))]
    assert builds == ["mxnet", "opencv-python-headless"]
    assert not [r.name for r in requirements(package["install_requires"]) if r.name.startswith("mxnet")]


def test_horovod_is_the_one_compiled_against_the_mxnet_of_the_constraints():
    versions = locked("3.11", "constraints.txt", "constraints-horovod.txt")
    assert versions["horovod"].endswith("+mxnet" + versions["mxnet"])


def test_version_is_that_of_the_package(package):
    import mxtrain

    assert package["version"] == mxtrain.__version__
    assert "mxtrain.data" in package["packages"] and "tests" not in package["packages"]


@pytest.fixture
def checkout(tmp_path):
    """A folder with what `make setup` needs, and a stand-in for python3: see `interpreter`."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for file in ("Makefile", "setup.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    return tmp_path


def interpreter(folder, suitable=True, venv=True, pip=True, name="python"):
    """Write a program that answers the Makefile like a Python with these properties; its path.

    Each call of its pip adds a line to pip.log. Without an index it finds only what is in .wheels, where its
    `pip wheel` puts a file; its `pip download` makes an archive with the files of Horovod that are patched.
    """
    path = folder / name
    pip_line = f'echo "$@" >> {folder}/pip.log; exit {0 if pip else 1}'
    source = folder / "horovod-0.28.1"
    for file, (text, _) in PATCHES.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text + "\n")
    path.write_text(f"""#!{SHELL}
case "$*" in
    *version_info*) exit {0 if suitable else 1} ;;
    *ensurepip*) exit {0 if venv else 1} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *" --no-index "*) ls .wheels/horovod-* > /dev/null 2>&1 || exit 1; {pip_line} ;;
    *" download --dest "*) tar -czf "$6/horovod-0.28.1.tar.gz" -C {folder} horovod-0.28.1; {pip_line} ;;
    *" wheel --wheel-dir "*)
        cp -r . {folder}/compiled; env > {folder}/compiled/env; touch "$6/horovod-0.28.1.whl"; {pip_line} ;;
    "-m pip "*) {pip_line} ;;
esac
""")
    path.chmod(0o755)
    return path


def make(folder, *arguments, **environment):
    return run(["make", *arguments], folder, **environment)


def run(command, folder, **environment):
    """Exit status and lines of standard error of `command`, run outside the make that may run these tests."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON")}
    env.update(environment)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr.splitlines()


def pip_calls(folder):
    log = folder / "pip.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize(
    "properties, text",
    [
        (dict(suitable=False), "is no Python 3.9 to 3.12; name one"),
        (dict(venv=False), "cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"),
    ],
)
def test_interpreter_that_cannot_be_used(checkout, properties, text):
    code, errors = make(checkout, "setup", f"PYTHON={interpreter(checkout, **properties)}")
    assert code == 2 and text in errors[0]
    assert len(errors) == 2 and errors[1].startswith("make")  # the second is make's own
    assert not (checkout / ".venv").exists()


def test_interpreter_that_is_missing(checkout):
    code, errors = make(checkout, "setup", "PYTHON=/nowhere/python3")
    assert code == 2 and errors[0].startswith("/nowhere/python3 is no Python 3.9 to 3.12")


def test_second_setup_does_nothing_and_a_changed_lock_does(checkout):
    python = f"PYTHON={interpreter(checkout)}"
    assert make(checkout, "setup", python) == (0, [])
    calls = pip_calls(checkout)
    assert calls == 2
    assert make(checkout, "setup", python) == make(checkout, "setup") == (0, [])
    assert pip_calls(checkout) == calls
    for file in ("docker/constraints.txt", "setup.py"):
        later = (checkout / ".venv/.installed").stat().st_mtime + 10
        os.utime(checkout / file, (later, later))
        assert make(checkout, "setup")[0] == 0
        assert pip_calls(checkout) == calls + 2
        os.utime(checkout / ".venv/.installed", (later + 10, later + 10))
        calls += 2


def test_failure_half_way_leaves_no_stamp(checkout):
    broken, good = interpreter(checkout, pip=False, name="broken"), interpreter(checkout, name="good")
    assert make(checkout, "setup", f"PYTHON={broken}")[0] == 2
    assert not (checkout / ".venv/.installed").exists()
    assert make(checkout, "setup")[0] == 2  # tries again, with the same interpreter
    assert make(checkout, "setup", f"PYTHON={good}")[0] == 0  # another one: the environment is made anew
    assert (checkout / ".venv/bin/python").read_text() == good.read_text()


def test_horovod_is_compiled_once(checkout):
    python = f"PYTHON={interpreter(checkout)}"
    compiled, compiler = checkout / "compiled", dict(CXX="sh")  # any program that exists
    assert make(checkout, "setup", python, "HOROVOD=0") == (0, []) and not compiled.exists()
    assert make(checkout, "setup", "HOROVOD=1", **compiler) == (0, [])
    for file, (_, text) in PATCHES.items():
        assert (compiled / file).read_text() == text + "\n"
    env = (compiled / "env").read_text().splitlines()
    assert {"HOROVOD_WITH_MXNET=1", "HOROVOD_WITH_GLOO=1", "HOROVOD_LOCAL_VERSION=mxnet1.9.1"} <= {*env}
    assert f"HOROVOD_CMAKE={checkout}/.venv/bin/cmake" in env
    shutil.rmtree(compiled)

    calls = pip_calls(checkout)
    assert make(checkout, "setup", "HOROVOD=1") == (0, []) and pip_calls(checkout) == calls
    assert make(checkout, "clean") == (0, []) and not (checkout / ".venv").exists()
    assert make(checkout, "setup", python, "HOROVOD=1") == (0, [])
    assert not compiled.exists()  # the wheel was kept

    later = (checkout / ".venv/.installed-horovod").stat().st_mtime + 10
    os.utime(checkout / "docker/build-horovod.sh", (later, later))
    assert make(checkout, "setup", "HOROVOD=1", **compiler)[0] == 0
    assert compiled.exists()  # the script is newer than the wheel


def test_horovod_without_a_compiler(checkout):
    code, errors = make(checkout, "setup", f"PYTHON={interpreter(checkout)}", "HOROVOD=1", CXX="missing-compiler")
    assert code == 2 and errors[0] == "Horovod needs a C++ compiler (Debian, Ubuntu: apt-get install g++)"
    assert len(errors) == 2 and errors[1].startswith("make")
    assert not (checkout / ".venv/.installed-horovod").exists()
    assert make(checkout, "setup")[0] == 0  # nothing else needs one


def test_ci_fails_without_tests(checkout):
    # pytest says 5 when it finds no test; make and .ci/run must not turn that into success.
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    path = interpreter(checkout)
    path.write_text(path.read_text().replace('    "-m pip', '    "-m pytest"*) exit 5 ;;\n    "-m pip'))
    for flags in (dict(CXX="sh"), dict(HOROVOD="0")):
        code, errors = run(["bash", ".ci/run"], checkout, PYTHON=str(path), **flags)
        assert code != 0 and "Error 5" in errors[-1]
        assert (checkout / ".venv/.installed-horovod").exists() == ("CXX" in flags)
        shutil.rmtree(checkout / ".venv")
