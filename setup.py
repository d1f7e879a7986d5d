"""The package. `make setup` installs it with the exact versions of docker/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "mxtrain/__init__.py").read_text(), re.MULTILINE)[1]
README = HERE / "README.md"

setup(
    name="mxtrain",
    version=VERSION,
    description="Train Apache MXNet Gluon networks: the same result on one CPU or many GPUs",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    packages=find_packages(include=["mxtrain", "mxtrain.*"]),
    python_requires=">=3.9,<3.13",
    install_requires=[
        # MXNet itself is in the extras cpu and gpu: its builds have different names and the same files, so
        # that a requirement on one of them would be installed over the other.
        "numpy>=1.19.3,<2",
        # Brings opencv-python. Where libGL is missing, opencv-python-headless takes its place, as in the
        # constraints file.
        "gluoncv>=0.10.5,<0.11",
        "scikit-learn>=0.24,<2",
        "jsonargparse[signatures]>=4.40,<5",
        "PyYAML>=5.4",
        "tqdm>=4.60,<5",
        "tensorboardX>=2.5,<3",
        "matplotlib>=3.4,<4",
        'setuptools>=65,<81; python_version >= "3.12"',  # for distutils, which MXNet imports
    ],
    extras_require={
        "cpu": ["mxnet==1.9.1"],
        # The libraries that the CUDA 11.2 build loads. A driver is needed too, but no CUDA toolkit.
        "gpu": [
            "mxnet-cu112==1.9.1",
            "nvidia-cuda-runtime-cu11==11.8.89",
            "nvidia-cuda-nvrtc-cu11==11.8.89",
            "nvidia-nvtx-cu11==11.8.86",
            "nvidia-cublas-cu11==11.11.3.6",
            "nvidia-cufft-cu11==10.9.0.58",
            "nvidia-curand-cu11==10.3.0.86",
            "nvidia-cusparse-cu11==11.7.5.86",
            "nvidia-cusolver-cu11==11.4.1.48",
            "nvidia-cudnn-cu11==8.9.6.50",
            "nvidia-nccl-cu11==2.21.5",
        ],
        # Its wheel holds libjpeg-turbo 3, which decodes only the part of a JPEG that a crop needs: a third faster.
        # Without it OpenCV gives the same pixels.
        "turbojpeg": ["turbojpeg>=0.0.2,<0.1"],
        # pip alone builds it without MXNet. `make setup HOROVOD=1` (docker/build-horovod.sh) compiles it against the
        # MXNet that is installed before it.
        "horovod": ["horovod==0.28.1"],
        # MXNet's exporter uses names that later versions removed; older ones have no wheel for Python 3.12.
        "onnx": [
            'onnx>=1.14.1,<1.17; python_version < "3.12"',
            'onnx>=1.16,<1.17; python_version >= "3.12"',
            "onnxruntime>=1.17,<1.20",
        ],
        "test": ["pytest>=8,<9", "pytest-timeout>=2.2,<3", "hypothesis>=6.100,<7"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
