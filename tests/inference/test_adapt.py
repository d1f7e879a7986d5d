"""Images from elsewhere in the shape and intensities of a run."""

import numpy as np
import pytest

from mxtrain.data import images
from mxtrain.inference.adapt import adapt
from mxtrain.tasks.pixels import Pixels


def pixels(height, width, channels, peak=255, resize=None):
    return Pixels((height, width, channels), channels, peak, (0.5,) * channels, (0.5,) * channels, resize)


def test_an_image_as_the_run_has_it_is_not_changed():
    for channels in (1, 3):
        image = np.random.RandomState(0).randint(0, 256, (8, 8, channels)).astype("uint8")
        np.testing.assert_array_equal(adapt(image, pixels(8, 8, channels)), image)


def test_grey_values_survive_the_way_through_a_color_file():
    """0..16 stored as 0..255 in three equal channels, and back."""
    values = np.arange(17, dtype="uint8").reshape(1, 17, 1)
    stored = np.repeat(np.rint(values * (255 / 16)).astype("uint8"), 3, axis=2)
    np.testing.assert_array_equal(adapt(stored, pixels(1, 17, 1, peak=16)), values)


def test_color_becomes_grey_by_the_usual_weights():
    color = np.random.RandomState(0).randint(0, 256, (8, 8, 3)).astype("uint8")
    grey = color @ np.array([0.299, 0.587, 0.114])
    # 0.5 for rounding to whole numbers; OpenCV computes with 14 bits.
    np.testing.assert_allclose(adapt(color, pixels(8, 8, 1))[..., 0], grey, atol=0.51)


def test_grey_is_repeated_for_a_run_on_color():
    grey = np.random.RandomState(0).randint(0, 256, (8, 8, 1)).astype("uint8")
    np.testing.assert_array_equal(adapt(grey, pixels(8, 8, 3)), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize("resize", [None, 10, 16])
def test_squares_go_through_the_pixel_path_of_the_evaluation(resize):
    image = np.random.RandomState(0).randint(0, 256, (33, 50, 3)).astype("uint8")
    np.testing.assert_array_equal(adapt(image, pixels(8, 8, 3, resize=resize)), images.eval_transform(image, resize or 8, 8))


def test_other_shapes_are_scaled_whole():
    image = np.random.RandomState(0).randint(0, 256, (12, 20, 3)).astype("uint8")
    np.testing.assert_array_equal(adapt(image, pixels(6, 10, 3)), images.scale(image, 6, 10))
