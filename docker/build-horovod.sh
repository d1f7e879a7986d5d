#!/bin/sh
# Compile Horovod against the MXNet of an environment, with Gloo and without MPI: minutes.
#     docker/build-horovod.sh .venv/bin/python FOLDER    # leaves horovod-0.28.1+mxnet1.9.1-....whl in FOLDER
# The environment needs what constraints.txt lists, and mxtrain. The wheel is named after the version of MXNet, so
# that it is not taken for a Horovod of another framework, nor one of those for it.
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
wheels=$(cd "$2" && pwd)
docker=$(cd "$(dirname "$0")" && pwd)
read -r version mxnet <<END
$(sed -n 's/^horovod==\(.*\)+mxnet\(.*\)/\1 \2/p' "$docker/constraints-horovod.txt")
END

# The names that CMake tries, when CXX is not set.
found=
for compiler in ${CXX:-c++ g++ clang++}; do
    if command -v "$compiler" > /dev/null; then found=$compiler; break; fi
done
if [ -z "$found" ]; then
    echo "Horovod needs a C++ compiler (Debian, Ubuntu: apt-get install g++)" >&2
    exit 1
fi

echo "Compiling Horovod (3 minutes on 2 cores, once; the result is kept in $wheels)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

pip install --quiet --no-deps -r "$docker/constraints-build.txt"
pip download --dest "$work" --quiet --no-deps --no-build-isolation --no-binary horovod "horovod==$version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
cd "$work/horovod-$version"
# MXNet's import needs the numpy aliases of mxtrain: while compiling, in `horovodrun`, which asks the library whether
# it has Gloo, and in a program that imports Horovod first.
sed -i 's/import mxnet/import mxtrain, mxnet/' cmake/Modules/FindMxnet.cmake
sed -i '0,/^from horovod/s//import mxtrain  # before MXNet: it prepares numpy\n&/' horovod/mxnet/__init__.py
# Under Gloo the list of ranks stays empty, and a rank that is waited for in vain is never reported, nor the run ended:
# HOROVOD_STALL_CHECK_TIME_SECONDS and HOROVOD_STALL_SHUTDOWN_TIME_SECONDS had no effect.
sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' horovod/common/gloo/gloo_controller.cc
# While one thread of Gloo sends, another that has something to read asks for the same lock without a pause, and where
# all cores compute it takes the time of the one that it waits for: a sixth of a step of ResNet-18 on two cores.
sed -i '/std::try_to_lock/,/return/s/return;/std::this_thread::sleep_for(std::chrono::microseconds(50));\n    return;/' \
    third_party/gloo/gloo/transport/tcp/pair.cc
sed -i '0,/^#include </s//#include <thread>\n&/' third_party/gloo/gloo/transport/tcp/pair.cc
# HOROVOD_GLOO_IFACE is obeyed for the first connections only: those of process sets, and so of all sums, are made at
# the address that the host's own name stands for, whichever interface was asked for.
sed -i '/::InitializeForProcessSet/,/^}/s/iface = gloo_iface_/iface = global_context.gloo_iface_/' \
    horovod/common/gloo/gloo_context.cc
# Where there are process sets, a process that has lost another asks it at the end whether it may forget the sets; an
# exception says that it has gone, and nobody catches it: the process is aborted, and cannot say why.
sed -i '/::Finalize_/,/^}/s/^ *InitializeRegisteredAndRemoveMarkedIfReady_(context, status);/      try {\
  &\
      } catch (const std::exception\&) {\
        id_to_process_set_[id].Finalize(status);\
        DeregisterProcessSet(id);\
        id_to_be_removed_ = SUCCESSFUL_REMOVAL;\
      }/' horovod/common/process_set.cc
# No debugging symbols: they cost a quarter of the time, and 45 MB. No test of a CUDA compiler, which is not used.
sed -i 's/RelWithDebInfo/Release/' setup.py
sed -i '/enable_language(CUDA)/d' CMakeLists.txt

# MAKEFLAGS: without it Horovod starts 8 jobs, and the flags of the make that calls this would reach the compilation.
export MAKEFLAGS="-j$(nproc)" LDFLAGS=-s HOROVOD_CMAKE="$(dirname "$python")/cmake" HOROVOD_LOCAL_VERSION="mxnet$mxnet"
export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_NVTX=1
pip wheel --wheel-dir "$wheels" --quiet --no-deps --no-build-isolation --no-cache-dir .
