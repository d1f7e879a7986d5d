"""The optimizers against their formulas in plain numpy (float64)."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import Parameter

from mxtrain.errors import UserError
from mxtrain.optim.optimizer import AGGREGATE, Optimizer
from holding import first_context, give, held
from mxtrain.optim.settings import OptimConfig

SHAPES = {"0.weight": (3, 4), "0.bias": (3,), "1.gamma": (3,), "1.beta": (3,)}
RATES = [0.1, 0.05, 0.2, 0.1, 0.01]
SCALE = 0.25
# A float32 1 - 0.999, as MXNet's adam has it, is off by 6e-5, and so a step by 3e-5: of the steps below, which make
# 0.46 together, that is 1.4e-5.
TOLERANCE = dict(rtol=1e-5, atol=2e-5)


def parameters(contexts, shapes=None, **options):
    found = {}
    for k, (name, shape) in enumerate((shapes or SHAPES).items()):
        parameter = Parameter(name.replace(".", "_"), shape=shape, **options)
        parameter.initialize(ctx=contexts)
        parameter.set_data(mx.nd.array(np.random.RandomState(k).randn(*shape)))
        found[name] = parameter
    return found


def gradients(update, shapes=None):
    return [np.random.RandomState(100 * update + k).randn(*shape).astype("float32")
            for k, shape in enumerate((shapes or SHAPES).values())]


def run(config, count=1, updates=range(len(RATES)), optimizer=None, of=None):
    """Updates on `count` contexts; returns (optimizer, parameters)."""
    contexts = [mx.cpu(i) for i in range(count)]
    of = of or parameters(contexts)
    optimizer = optimizer or Optimizer(config, of, held(of, contexts))
    shapes = {name: p.shape for name, p in of.items()}
    for update in updates:
        for own in optimizer._held:
            give(own, gradients(update, shapes))
        optimizer.update(update, RATES[update], SCALE)
    return optimizer, of


def new(name):
    of = parameters([mx.cpu(0)])
    return Optimizer(OptimConfig(optimizer=name), of, held(of, [mx.cpu(0)]))


def sgd(w, g, state, lr, t, wd, momentum=0.9):
    v = momentum * state.get("v", 0) - lr * (g + wd * w)
    return w + v, {"v": v}


def nag(w, g, state, lr, t, wd, momentum=0.9):
    old = momentum * state.get("v", 0)
    v = old - lr * (g + wd * w)
    new = w + momentum * v - lr * (g + wd * w)
    # MXNet's operator has overwritten the weight when it comes to the momentum, whose decay is that of the new one.
    return new, {"v": old - lr * (g + wd * new)}


def moments(g, state, beta1=0.9, beta2=0.999):
    return beta1 * state.get("m", 0) + (1 - beta1) * g, beta2 * state.get("v", 0) + (1 - beta2) * g**2


def adam(w, g, state, lr, t, wd, epsilon=1e-8):
    m, v = moments(g + wd * w, state)
    return w - lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + epsilon), {"m": m, "v": v}


def adamw(w, g, state, lr, t, wd, epsilon=1e-8):
    m, v = moments(g, state)
    step = np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + epsilon)
    return w - lr * step - lr * wd * w, {"m": m, "v": v}


FORMULAS = {"sgd": sgd, "nag": nag, "adam": adam, "adamw": adamw}


def by_numpy(formula, decay, lr_mult=1.0, decays=lambda name: True):
    expected = {}
    for k, (name, shape) in enumerate(SHAPES.items()):
        w, state = np.random.RandomState(k).randn(*shape), {}
        for update, lr in enumerate(RATES):
            g = SCALE * gradients(update)[k].astype("float64")
            w, state = formula(w, g, state, lr * lr_mult, update + 1, decay if decays(name) else 0.0)
        expected[name] = w
    return expected


def check(of, expected):
    for name, parameter in of.items():
        for data in parameter.list_data():
            np.testing.assert_allclose(data.asnumpy(), expected[name], err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_follows_its_formula(name, count, decay):
    _, of = run(OptimConfig(optimizer=name, weight_decay=decay), count)
    check(of, by_numpy(FORMULAS[name], decay))


def test_sgd_and_nag_without_momentum():
    for name in ("sgd", "nag"):
        optimizer, of = run(OptimConfig(optimizer=name, momentum=0.0, weight_decay=0.1))
        check(of, by_numpy(lambda *args: sgd(*args, momentum=0.0), 0.1))
        assert optimizer.state_arrays(first_context) == {}


def test_adamw_decays_apart_from_the_gradient():
    # Without a gradient adam's decay is scaled by its own size; that of adamw is the rate times the weight.
    for name, expected in (("adamw", 1 - 0.1 * 0.3), ("adam", 1 - 0.1)):
        of = {"w": Parameter("w", shape=(1,))}
        of["w"].initialize(mx.init.One())
        optimizer = Optimizer(OptimConfig(optimizer=name, weight_decay=0.3), of, held(of, [mx.cpu(0)]))
        optimizer.update(0, 0.1, 1.0)
        assert of["w"].data().asscalar() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_biases_and_normalizations_need_not_decay(name):
    _, of = run(OptimConfig(optimizer=name, weight_decay=0.1, decay_all=False))
    check(of, by_numpy(FORMULAS[name], 0.1, decays=lambda parameter: parameter.endswith("weight")))


@pytest.mark.parametrize("name", FORMULAS)
def test_multipliers_of_a_parameter(name):
    contexts = [mx.cpu(0)]
    _, of = run(OptimConfig(optimizer=name, weight_decay=0.1), of=parameters(contexts, lr_mult=0.5, wd_mult=2.0))
    check(of, by_numpy(FORMULAS[name], 0.2, lr_mult=0.5))
    _, of = run(OptimConfig(optimizer=name, weight_decay=0.1), of=parameters(contexts, lr_mult=0.0))
    check(of, by_numpy(FORMULAS[name], 0.1, lr_mult=0.0))  # stays where it is


@pytest.mark.parametrize("name", FORMULAS)
def test_more_parameters_than_fit_into_one_call(name):
    shapes = {f"{i}.weight": (2,) for i in range(2 * AGGREGATE + 3)}
    config = OptimConfig(optimizer=name, weight_decay=0.0)
    _, together = run(config, of=parameters([mx.cpu(0)], shapes))
    for key in (0, AGGREGATE - 1, AGGREGATE, 2 * AGGREGATE + 2):
        w, state = np.random.RandomState(key).randn(2), {}
        for update, lr in enumerate(RATES):
            g = SCALE * np.random.RandomState(100 * update + key).randn(2).astype("float32").astype("float64")
            w, state = FORMULAS[name](w, g, state, lr, update + 1, 0.0)
        np.testing.assert_allclose(together[f"{key}.weight"].data().asnumpy(), w, **TOLERANCE)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (1, 3)])
def test_states_go_to_any_number_of_contexts(name, before, after):
    config = OptimConfig(optimizer=name, weight_decay=0.1)
    _, expected = run(config)
    optimizer, of = run(config, before, range(2))
    states = optimizer.state_arrays(first_context)
    assert all(isinstance(array, np.ndarray) for array in states.values())
    contexts = [mx.cpu(i) for i in range(after)]
    resumed = parameters(contexts)
    for key, parameter in of.items():
        resumed[key].set_data(parameter.data(mx.cpu(0)))
    other = Optimizer(config, resumed, held(resumed, contexts))
    other.load_state_arrays(states)
    run(config, after, range(2, len(RATES)), other, resumed)
    for key, parameter in resumed.items():
        for ctx in contexts:
            assert parameter.data(ctx).context == ctx
            np.testing.assert_array_equal(parameter.data(ctx).asnumpy(), expected[key].data().asnumpy())


def test_states_of_another_optimizer_or_network_are_refused():
    states = run(OptimConfig(optimizer="sgd"))[0].state_arrays(first_context)
    other = new("adam")
    with pytest.raises(UserError, match="0.bias/1"):
        other.load_state_arrays(states)
    same = new("sgd")
    with pytest.raises(UserError, match="shapes"):
        same.load_state_arrays({name: array[:1] for name, array in states.items()})


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UserError, match="--optimizer adamm: must be one of sgd, nag, adam, "):
        new("adamm")
