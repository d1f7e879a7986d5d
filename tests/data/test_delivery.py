import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images
from mxtrain.data.augment import Changes, change
from mxtrain.data.delivery import delivery_of
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
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


ON = dict(color_jitter=0.4, hue=0.1, lighting=0.1, rand_augment="2,9", random_erasing=0.5)


@pytest.mark.parametrize("setting", ON)
def test_any_change_of_pixels_is_a_transform_of_stored_images_and_not_of_evaluated_ones(setting):
    delivery = delivery_of(DataConfig(**{setting: ON[setting]}), "none", (28, 28, 3), seed=0)
    assert delivery.train is not None and delivery.evaluate is None
    assert delivery.augment == f"none, {setting} {ON[setting]}"


@pytest.mark.parametrize("augment", ["none", "flip", "shift", "shift-flip", "crop"])
@pytest.mark.parametrize("stored, size", [((28, 28, 3), None), ((28, 28, 3), 20), (None, 20)])
def test_changes_of_pixels_come_after_the_cutting(augment, stored, size):
    delivery = delivery_of(DataConfig(augment=augment, image_size=size, **ON), "none", stored, seed=3)
    image = np.random.default_rng(1).integers(0, 256, stored or (50, 70, 3), dtype=np.uint8)
    cut = delivery_of(DataConfig(augment=augment, image_size=size), "none", stored, seed=3)
    changes = Changes((2, 9), 0.4, 0.1, 0.1, 0.5)
    for index in range(5):
        plain = image if cut.train is None else cut.train(image, 2, index)
        assert np.array_equal(delivery.train(image, 2, index), change(plain, changes, 3, 2, index))
        if delivery.evaluate is not None:
            assert np.array_equal(delivery.evaluate(image, 2, index), cut.evaluate(image, 2, index))


@pytest.mark.parametrize("setting", ["color_jitter", "rand_augment", "random_erasing"])
def test_gray_images_can_be_changed(setting):
    delivery = delivery_of(DataConfig(**{setting: ON[setting]}), "none", (28, 28, 1), seed=0)
    assert delivery.train(IMAGE, 0, 0).shape == (28, 28, 1)


@pytest.mark.parametrize(
    "setting, channels, peak, text",
    [
        *((name, 1, 16, f"--{name.replace('_', '-')} {value}: .*255.* 16") for name, value in ON.items()),
        ("hue", 1, 255, "--hue 0.1: .*one channel"),
        ("lighting", 1, 255, "--lighting 0.1: .*one channel"),
        ("color_jitter", 4, 255, "--color-jitter 0.4: .*have 4"),
    ],
)
def test_changes_that_make_no_sense_are_refused(setting, channels, peak, text):
    with pytest.raises(UserError, match=text) as error:
        delivery_of(DataConfig(**{setting: ON[setting]}), "none", (8, 8, channels), seed=0, peak=peak)
    assert "\n" not in str(error.value)


def test_the_sources_peak_is_heeded():
    with pytest.raises(UserError, match="--random-erasing 0.5: .* from 0 to 16"):
        open_data(DataConfig(random_erasing=0.5))
