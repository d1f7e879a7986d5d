import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images
from mxtrain.data.delivery import delivery_of
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

IMAGE = np.random.default_rng(0).integers(0, 256, (28, 28, 1), dtype=np.uint8)


@pytest.mark.parametrize(
    "settings, stored, delivered",
    [
        (dict(), (28, 28, 1), (28, 28, 1)),
        (dict(image_size=28), (28, 28, 1), (28, 28, 1)),
        (dict(image_size=32), (28, 28, 1), (32, 32, 1)),
        (dict(resize=32), (28, 28, 1), (28, 28, 1)),
        (dict(augment="crop"), (28, 28, 1), (28, 28, 1)),
        (dict(augment="shift"), (20, 30, 3), (20, 30, 3)),
        (dict(image_size=20), (20, 30, 3), (20, 20, 3)),
        (dict(), None, (224, 224, 3)),
        (dict(image_size=96, resize=96), None, (96, 96, 3)),
    ],
)
def test_images_have_the_shape_that_is_announced(settings, stored, delivered):
    delivery = delivery_of(DataConfig(**settings), "none", stored, seed=0)
    assert delivery.shape == delivered
    image = np.zeros(stored or (50, 70, 3), np.uint8)
    for transform in (delivery.train, delivery.evaluate):
        assert (image if transform is None else transform(image, 0, 0)).shape == delivered


@pytest.mark.parametrize(
    "settings", [dict(), dict(image_size=28), dict(image_size=28, resize=28, augment="none")]
)
def test_nothing_is_done_to_images_that_fit(settings):
    delivery = delivery_of(DataConfig(**settings), "none", (28, 28, 1), seed=0)
    assert delivery.train is None and delivery.evaluate is None


def test_resize_acts_on_stored_images_too():
    delivery = delivery_of(DataConfig(resize=40), "none", (28, 28, 1), seed=0)
    assert np.array_equal(delivery.evaluate(IMAGE, 0, 0), images.eval_transform(IMAGE, 40, 28))


def test_the_sources_default_augmentation_gives_way():
    assert delivery_of(DataConfig(), "shift-flip", (32, 32, 3), 0).augment == "shift-flip"
    assert delivery_of(DataConfig(augment="none"), "shift-flip", (32, 32, 3), 0).train is None


@pytest.mark.parametrize(
    "settings, stored, text",
    [
        (dict(resize=200), None, "--resize 200: .*224"),
        (dict(resize=20), (28, 28, 1), "--resize 20: .*28"),
        (dict(resize=40), (20, 30, 1), "--resize 40 needs --image-size.*20x30x1"),
        (dict(augment="crop"), (20, 30, 1), "--augment crop needs --image-size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, stored, text):
    with pytest.raises(UserError, match=text):
        delivery_of(DataConfig(**settings), "none", stored, seed=0)
