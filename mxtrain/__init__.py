"""mxtrain: train Apache MXNet Gluon networks, the same on one CPU or many GPUs."""

from mxtrain import compat  # noqa: F401  (first: it decides what must be decided before mxnet is imported)
from mxtrain.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "fit"]


def __getattr__(name):
    # `fit` needs mxnet, which takes seconds to import: not before somebody asks for it (PEP 562).
    if name == "fit":
        from mxtrain.train.fit import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
