"""Parameters that every context holds whole, as parallel.holdings has them, without a layout."""

import mxnet as mx

from mxtrain.parallel.holdings import Held
from mxtrain.parallel.zero import Part


def held(parameters, contexts):
    """For each context what an optimizer updates, with gradients of zero."""
    return [[Held(Part(number, 0, p.data(ctx).size, None), p.data(ctx), mx.nd.zeros(p.shape, ctx=ctx))
             for number, p in enumerate(parameters.values())] for ctx in contexts]


def give(own, gradients):
    """Writes the gradients of a context."""
    for one, gradient in zip(own, gradients):
        one.gradient[:] = mx.nd.array(gradient)


def first_context(arrays, count):
    """What Layout.assemble does here."""
    return [[array.asnumpy() for array in own] for own in arrays[0]]
