"""How a network is cut into segments: blocks whose chaining computes the network.

Pipelines, recomputation and exact seeding all work on the finest such chain. It is found by running a block's
forward on a symbol and watching its children: when the input goes into one child, its output into the next,
and the last output is what the block returns, then the block is the chain of those children, and each child
may be a chain again. So any HybridSequential, the zoos' `features` and `output`, gluoncv's ResNets and most
networks written straight down are cut for nothing; a residual block, whose input is used twice, is one
segment. A network that knows better offers `plan()`, which returns its list of segments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter, nn

from mxtrain.errors import UserError

_RANDOM = re.compile(
    "random_(?!pdf_)|sample_|shuffle|multinomial|uniform|"
    "_npi_(bernoulli|choice|exponential|gamma|gumbel|logistic|normal|pareto|rayleigh|weibull)"
)
_CUSTOM = ("Custom", "_CustomFunction", "_npi_Custom")  # Python that no graph shows


class _Node(NamedTuple):
    """A block and the chain that it is; without parts it is a segment."""

    block: Block
    parts: Tuple["_Node", ...]


def segments(net: Block) -> List[Block]:
    """The finest chain of blocks that computes `net`; `[net]` when it is no chain.

    No two segments share a parameter. A block without parameters may stand in the chain more than once.
    """
    return _leaves(_tree(net))


def blocks(net: Block) -> List[List[Block]]:
    """`segments(net)`, grouped by the network's own blocks, such as its residual blocks.

    A block of the network is the outermost kind of composite block that it repeats; what stands between two
    of them is a group of its own. A network that repeats none is grouped by its layers with weights, each
    with what follows it.
    """
    tree = _tree(net)
    kinds = Counter(type(node.block) for node in _walk(tree) if _is_composite(node.block))
    groups: List[List[Block]] = []
    loose = False  # whether the last group is one between blocks

    def visit(node: _Node) -> None:
        nonlocal loose
        if kinds[type(node.block)] > 1:
            groups.append(_leaves(node))
            loose = False
        elif node.parts:
            for part in node.parts:
                visit(part)
        elif loose:
            groups[-1].append(node.block)
        else:
            groups.append([node.block])
            loose = True

    visit(tree)
    return _by_weights(groups[0]) if len(groups) == 1 else groups


def check(net: Block, chain: Sequence[Block], *inputs: mx.nd.NDArray) -> None:
    """Raise UserError unless chaining `chain` gives the bits of `net`, in predict mode.

    net: initialized. inputs: what the network takes, on one of its contexts; the first block of the chain
    gets them.
    """
    with autograd.pause(train_mode=False):
        expected = net(*inputs)
        output = chain[0](*inputs)
        for block in chain[1:]:
            output = block(output)
    if not _equal(expected, output):
        raise UserError(f"the plan of {type(net).__name__} is wrong: its {len(chain)} segments, one after "
                        "the other, give another output than the network")


def draws(block: Block) -> bool:
    """Whether the block uses random numbers in training; True when that cannot be found out.

    Seeding a block that draws nothing costs microseconds, so doubt is cheap.
    """
    if not isinstance(block, HybridBlock):
        # Its Python may ask for random numbers that no graph shows, unless it only chains its children.
        return not _is_sequence(block) or any(draws(child) for child in block)
    try:
        with autograd.train_mode():
            output = block(*(mx.sym.var(f"input{i}") for i in range(_count_inputs(block))))
        graph = json.loads(mx.sym.Group(_flat(output)).tojson())
    except Exception:  # whatever forward does to a symbol that only an array can take
        return True
    return _draws_in(graph)


def tied(net: Block) -> List[Tuple[Parameter, Parameter]]:
    """Pairs of parameters that are one weight, used in two places, such as an embedding and an output: each has a copy
    of it, since the places may be on two devices. A network with such says so by `tied()`, which returns its pairs.
    Raises UserError for a parameter in two of them."""
    pairs = list(net.tied()) if hasattr(net, "tied") else []
    for parameter, count in Counter(parameter for pair in pairs for parameter in pair).items():
        if count > 1:
            raise UserError(f"{type(net).__name__}.tied(): {parameter.name} is in {count} pairs; a weight can be in two "
                            "places, not more")
    return pairs


def leaves_out(block: Block) -> bool:
    """Whether a pass through the block may give no gradient to some parameter that it has."""
    if not isinstance(block, HybridBlock):
        return True
    names = {parameter.name for parameter in block.collect_params().values()}
    try:
        with autograd.train_mode():
            output = block(*(mx.sym.var(f"input{i}") for i in range(_count_inputs(block))))
        graph = mx.sym.Group(_flat(output))
    except Exception:  # whatever forward does to a symbol that only an array can take
        return True
    return not names <= {*graph.list_arguments(), *graph.list_auxiliary_states()}


def _tree(block: Block) -> _Node:
    if hasattr(block, "plan"):
        return _Node(block, tuple(_Node(part, ()) for part in block.plan()))
    if hasattr(block, "split_layers"):
        return _Node(block, ())  # see models.split
    parts = tuple(_tree(child) for child in _chain(block))
    return _Node(block, () if _share_parameters([part.block for part in parts]) else parts)


def _chain(block: Block) -> List[Block]:
    """The children whose chaining is the block's forward, in training and in prediction; [] when there are
    none."""
    if block._forward_hooks or block._forward_pre_hooks:
        return []  # hooks would not run if only the children did
    if _is_sequence(block):
        return list(block._children.values())
    try:
        with autograd.train_mode():
            training = _watch(block)
        with autograd.predict_mode():
            prediction = _watch(block)
    except Exception:  # whatever forward does to a symbol that only an array can take
        return []
    return training if training == prediction else []


def _is_sequence(block: Block) -> bool:
    kind = type(block)
    hybrid = kind.forward is HybridBlock.forward
    return kind.forward is nn.Sequential.forward or (
        hybrid and kind.hybrid_forward is nn.HybridSequential.hybrid_forward
    )


def _watch(block: Block) -> List[Block]:
    calls: List[Tuple] = []
    depth = 0  # a child may also be a child of another one: only the calls that the block itself makes count

    def enter(*_) -> None:
        nonlocal depth
        depth += 1

    def leave(*call) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            calls.append(call)

    children = {id(child): child for child in block._children.values()}.values()
    hooks = [child.register_forward_pre_hook(enter) for child in children]
    hooks += [child.register_forward_hook(leave) for child in children]
    try:
        value = first = mx.sym.var("data")
        output = block(first)
    finally:
        for hook in hooks:
            hook.detach()
    for _, inputs, result in calls:
        # Any operator between two children would have made a new symbol.
        if len(inputs) != 1 or inputs[0] is not value:
            return []
        value = result
    return [child for child, _, _ in calls] if output is value else []


def _share_parameters(chain: Sequence[Block]) -> bool:
    owners = Counter(id(p) for block in chain for p in block.collect_params().values())
    return any(count > 1 for count in owners.values())


def _walk(node: _Node) -> Iterator[_Node]:
    yield node
    for part in node.parts:
        yield from _walk(part)


def _leaves(node: _Node) -> List[Block]:
    return [n.block for n in _walk(node) if not n.parts]


def _is_composite(block: Block) -> bool:
    """Whether it is a block of its own kind: no container, and no layer with an activation inside."""
    container = type(block) in (nn.Sequential, nn.HybridSequential)
    return bool(block._children) and not block._reg_params and not container


def _by_weights(chain: Sequence[Block]) -> List[List[Block]]:
    groups: List[List[Block]] = []
    seen = False  # a layer with weights, in the last group
    for block in chain:
        weighted = any(name.endswith("weight") for name in block.collect_params())
        if not groups or (weighted and seen):
            groups.append([])
            seen = False
        groups[-1].append(block)
        seen = seen or weighted
    return groups


def _count_inputs(block: HybridBlock) -> int:
    """Inputs of hybrid_forward that must be given: after F, without a default, and no parameter of the
    block."""
    arguments = list(inspect.signature(block.hybrid_forward).parameters.values())[1:]
    needed = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD and a.default is a.empty]
    return sum(a.name not in block._reg_params for a in needed) or 1


def _draws_in(graph: Dict) -> bool:
    return any(_node_draws(node) for node in graph["nodes"])


def _node_draws(node: Dict) -> bool:
    operator, attributes = node["op"], node.get("attrs", {})
    if any(_draws_in(subgraph) for subgraph in node.get("subgraphs", ())):  # of a loop or a condition
        return True
    if operator in ("Dropout", "_npx_dropout"):
        return float(attributes.get("p", 0.5)) > 0
    if operator in ("RNN", "_npx_rnn"):
        return float(attributes.get("p", 0)) > 0
    if operator == "LeakyReLU":
        return attributes.get("act_type") == "rrelu"
    return operator in _CUSTOM or _RANDOM.search(operator) is not None


def _flat(output) -> List:
    if isinstance(output, (list, tuple)):
        return [leaf for part in output for leaf in _flat(part)]
    return [output]


def _equal(a, b) -> bool:
    arrays = [(x.asnumpy(), y.asnumpy()) for x, y in zip(_flat(a), _flat(b))]
    return len(_flat(a)) == len(_flat(b)) and all(
        x.shape == y.shape and x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in arrays
    )
