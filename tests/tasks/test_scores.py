"""F1, precision and recall against hand counts; they do not depend on batches."""

import numpy as np
import pytest

from mxtrain.tasks.scores import F1, by_class


def values(predicted):
    """What a ClassEvaluation gives, of which only the last column counts here."""
    return np.stack([np.full(len(predicted), 9.0), predicted], axis=1)


def test_by_hand():
    # class 0: 3 of 4 found, 5 predicted; class 1: 2 of 4 found, 3 predicted
    found = by_class(np.array([[3, 1], [2, 2]]))
    np.testing.assert_allclose(found["precision"], [3 / 5, 2 / 3])
    np.testing.assert_allclose(found["recall"], [3 / 4, 2 / 4])
    np.testing.assert_allclose(found["f1"], [2 * 3 / 9, 2 * 2 / 7])


def test_nothing_by_nothing_is_zero():
    found = by_class(np.array([[4, 0, 0], [3, 0, 0], [0, 0, 0]]))
    assert [found[name].tolist()[1:] for name in ("precision", "recall", "f1")] == [[0, 0]] * 3
    assert np.isfinite([*found.values()]).all()


@pytest.mark.parametrize("positive", [0, 1, None])
def test_batches_do_not_matter_and_sklearn_agrees(positive):
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.RandomState(0)
    true, predicted = random.randint(0, 2, 100), random.randint(0, 2, 100)
    whole, parts = F1(2, positive), F1(2, positive)
    whole.see(true, values(predicted))
    for start in range(0, 100, 7):
        parts.see(true[start:start + 7], values(predicted[start:start + 7]))
    assert whole.values() == parts.values() and whole.confusion.sum() == 100
    average = {"average": "macro"} if positive is None else {"pos_label": positive}
    assert whole.values()["f1"] == pytest.approx(metrics.f1_score(true, predicted, **average), abs=1e-15)
