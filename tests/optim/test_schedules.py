"""The learning rate as a function of the update, at every edge of a run."""

import math

import pytest

from mxtrain.errors import UserError
from mxtrain.optim.schedules import learning_rate
from mxtrain.optim.settings import OptimConfig

approx = pytest.approx  # to 1e-6: the formulas are the same, their roundings need not be


def rates(updates_per_epoch=4, epochs=5, extra=0, **settings):
    config = OptimConfig(lr=0.8, **settings)
    return [learning_rate(config, k, updates_per_epoch, epochs) for k in range(updates_per_epoch * epochs + extra)]


def test_constant():
    assert rates(schedule="constant", extra=3) == [0.8] * 23


def test_step_changes_with_the_first_update_of_an_epoch():
    got = rates(schedule="step", decay_epochs=[2, 4])
    assert got == approx([0.8] * 8 + [0.08] * 8 + [0.008] * 4)


@pytest.mark.parametrize("epochs", [[4, 2], [2, 4], [2, 4, 70], [4.0, 2.0]])
def test_step_takes_any_order_and_epochs_past_the_end(epochs):
    assert rates(schedule="step", decay_epochs=epochs) == approx([0.8] * 8 + [0.08] * 8 + [0.008] * 4)


def test_step_may_fall_twice_at_once_within_an_epoch_and_at_the_start():
    assert rates(schedule="step", decay_epochs=[0, 1.5, 1.5], decay_factor=0.5, epochs=2) == approx([0.4] * 6 + [0.1] * 2)


def test_step_needs_epochs_and_epochs_need_step():
    with pytest.raises(UserError, match="--decay-epochs"):
        OptimConfig(schedule="step", decay_epochs=[])
    with pytest.raises(UserError, match="no effect"):
        OptimConfig(schedule="cosine", decay_epochs=[3])
    with pytest.raises(UserError, match="-1"):
        OptimConfig(schedule="step", decay_epochs=[3, -1])


def test_cosine_goes_from_the_rate_to_the_final_one():
    got = rates(schedule="cosine", final_lr=0.2)
    assert got == approx([0.2 + 0.6 * (1 + math.cos(math.pi * k / 20)) / 2 for k in range(20)])
    assert got[0] == 0.8 and got[10] == approx(0.5)
    assert rates(schedule="cosine", final_lr=0.2, extra=5)[20:] == approx([0.2] * 5)


def test_poly():
    assert rates(schedule="poly", poly_power=3.0) == approx([0.8 * (1 - k / 20) ** 3 for k in range(20)])
    assert rates(schedule="poly", poly_power=3.0, final_lr=0.1, extra=5)[20:] == approx([0.1] * 5)


@pytest.mark.parametrize("schedule", ["constant", "poly", "cosine"])
def test_warm_up_is_a_straight_line_that_reaches_the_rate_with_its_last_update(schedule):
    got = rates(schedule=schedule, warmup_epochs=1.5)
    assert got[:6] == approx([0.8 * k / 6 for k in range(1, 7)])
    assert got[6] == 0.8  # the rest starts at its highest
    assert got[7:] == sorted(got[7:], reverse=True)


def test_step_counts_from_the_start_of_the_run_not_of_the_warm_up():
    got = rates(schedule="step", decay_epochs=[1, 3], warmup_epochs=2)
    assert got == approx([0.1 * k for k in range(1, 9)] + [0.08] * 4 + [0.008] * 8)


@pytest.mark.parametrize("schedule", ["constant", "step", "poly", "cosine"])
@pytest.mark.parametrize("warmup", [5, 9])
def test_a_warm_up_as_long_as_the_run_or_longer_rises_to_the_end(schedule, warmup):
    got = rates(schedule=schedule, warmup_epochs=warmup, **({"decay_epochs": [1]} if schedule == "step" else {}))
    assert got == approx([0.8 * k / (4 * warmup) for k in range(1, 21)])


@pytest.mark.parametrize("schedule", ["constant", "step", "poly", "cosine"])
def test_one_batch_per_epoch_and_one_epoch(schedule):
    more = {"decay_epochs": [2]} if schedule == "step" else {}
    got = rates(updates_per_epoch=1, epochs=4, schedule=schedule, **more)
    expected = {"constant": [0.8] * 4, "step": [0.8, 0.8, 0.08, 0.08], "poly": [0.8 * (1 - k / 4) ** 2 for k in range(4)],
                "cosine": [0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]}
    assert got == approx(expected[schedule])
    assert rates(updates_per_epoch=1, epochs=1, schedule=schedule, **more) == [0.8]


def test_a_fraction_of_an_epoch_that_is_less_than_half_an_update_is_no_warm_up():
    assert rates(schedule="constant", warmup_epochs=0.1) == [0.8] * 20


@pytest.mark.parametrize("field", ["lr", "warmup_epochs", "final_lr", "momentum", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_what_is_no_rate_is_refused(field, value):
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')}"):
        OptimConfig(**{field: value})
