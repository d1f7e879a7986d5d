"""What an initialized network starts from, and what stays as it is."""

from __future__ import annotations

import logging

from mxnet.gluon import Block

from mxtrain.models import weights

_log = logging.getLogger("mxtrain")


def start(net: Block, model) -> None:
    """Applies the starting weights of a ModelConfig to an initialized network."""
    if model.zero_gamma:
        _log.info("--zero-gamma: %d residual blocks start as the identity", len(weights.zero_gamma(net)))
    if model.pretrained:
        weights.pretrained(net, model.model, model.pretrained_root)
    if model.init_from:
        weights.init_from(net, model.init_from)


def freeze(net: Block, model) -> None:
    """Applies what a ModelConfig freezes."""
    if model.freeze:
        frozen = weights.freeze(net, model.freeze)
        _log.info("--freeze: %d of %d parameters keep their values", len(frozen), len(weights.parameters(net)))
