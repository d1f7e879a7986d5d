import re

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images
from mxtrain.errors import UserError


def load(path):
    """All pixels of a file."""
    return images.pixels(images.load(path))


def picture(height, width, seed=0):
    """A smooth picture (height, width, 3) uint8: JPEG changes it little."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_LINEAR)


def write(path, pixels, *options):
    assert cv2.imwrite(str(path), pixels if pixels.ndim == 2 else pixels[:, :, ::-1], *options)
    return str(path)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tif", "a b ü 漢 #.png", "-a.png"])
def test_lossless_files_are_read_exactly(tmp_path, name):
    pixels = picture(20, 30)
    encoded = cv2.imencode("." + name.rsplit(".")[-1], pixels[:, :, ::-1])[1]
    (tmp_path / name).write_bytes(encoded.tobytes())
    loaded = load(str(tmp_path / name))
    assert loaded.dtype == np.uint8 and np.array_equal(loaded, pixels)


def test_jpeg_is_rgb(tmp_path):
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 255
    loaded = load(write(tmp_path / "a.jpg", red))
    assert loaded[..., 0].min() > 240 and loaded[..., 1:].max() < 15  # JPEG's color conversion rounds


def test_every_mode_becomes_rgb(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = picture(20, 30)
    source = image.fromarray(pixels)
    for mode, suffix in (
        ("L", "png"),
        ("LA", "png"),
        ("RGBA", "png"),
        ("P", "png"),
        ("1", "png"),
        ("CMYK", "jpg"),
    ):
        path = tmp_path / f"{mode}.{suffix}"
        source.convert(mode).save(path, quality=95)
        loaded = load(str(path))
        expected = np.asarray(image.open(path).convert("RGB")).astype(int)
        # CMYK: OpenCV and Pillow round the conversion of an ink differently, by one or two.
        assert loaded.shape == (20, 30, 3) and np.abs(loaded - expected).max() <= (
            2 if mode == "CMYK" else 0
        ), mode


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    loaded = load(write(tmp_path / "a.png", grey * 257))
    assert np.array_equal(loaded, np.repeat(grey[..., np.newaxis], 3, axis=2))


@pytest.mark.parametrize("orientation, turn", [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_exif_orientation_is_applied(tmp_path, orientation, turn):
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = orientation
    pixels = picture(24, 40)
    image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=100, subsampling=0)
    upright = np.rot90(pixels, turn)
    jpeg = load(str(tmp_path / "a.jpg"))
    assert jpeg.shape == upright.shape
    assert (
        np.abs(jpeg.astype(int) - upright).max() < 16
    )  # the loss of JPEG; a wrong turn is off by 100 and more
    assert load(str(tmp_path / "a.png")).shape == upright.shape


@pytest.mark.parametrize("suffix", ["jpg", "png", "bmp", "tif", "webp", "ppm"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_file_cut_short_is_named(tmp_path, suffix, kept):
    path = tmp_path / f"half.{suffix}"
    content = cv2.imencode("." + suffix, picture(120, 160))[1].tobytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError, match=re.escape(str(path))):
        load(str(path))


def test_a_progressive_jpeg_cut_short_is_named(tmp_path):
    content = cv2.imencode(".jpg", picture(120, 160), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    (tmp_path / "a.jpg").write_bytes(content[:-100])
    with pytest.raises(UserError, match="a.jpg"):
        load(str(tmp_path / "a.jpg"))


@pytest.mark.parametrize("content", [b"", b"not an image at all" * 9, bytes(range(256)) * 4])
def test_what_is_no_image_is_named(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(UserError, match="a.jpg"):
        load(str(tmp_path / "a.jpg"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone.jpg: No such file"):
        load(str(tmp_path / "gone.jpg"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 500), (2000, 1), (300, 400), (40, 50), (224, 224)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_shape_is_delivered_at_the_size(shape, channels):
    image = picture(*shape)[..., :channels]
    assert images.eval_transform(image, 256, 224).shape == (224, 224, channels)
    rng = images.sample_rng(0, 0, 0)
    assert images.train_transform(image, 224, rng).shape == (224, 224, channels)


def test_evaluation_cuts_out_the_center():
    image = np.zeros((80, 120, 3), np.uint8)
    image[:, :, 0] = np.arange(120)
    image[:, :, 1] = np.arange(80)[:, np.newaxis]
    # Shorter side 80 at scale 1; the central 40 x 40 is rows 20..59 and columns 40..79, unscaled.
    assert np.array_equal(images.eval_transform(image, 80, 40), image[20:60, 40:80])


def test_shrinking_averages():
    noise = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    means = noise[:, 20:100].reshape(40, 2, 40, 2, 3).mean(axis=(1, 3))
    # Half a unit: how a half is rounded is OpenCV's choice.
    assert np.abs(images.eval_transform(noise, 40, 40) - means).max() <= 0.5


def test_an_image_at_its_size_is_left_alone():
    image = picture(32, 32)
    assert np.array_equal(images.eval_transform(image, 32, 32), image)


@pytest.mark.parametrize("augment", ["flip", "shift", "shift-flip", "crop"])
def test_augmentation_is_a_function_of_seed_epoch_and_sample(augment):
    image = picture(32, 32)

    def changed(seed, epoch, index):
        return images.train_transform(image, 32, images.sample_rng(seed, epoch, index), augment).tobytes()

    assert changed(1, 2, 3) == changed(1, 2, 3)
    for axis in range(3):
        keys = [[1, 2, 3] for _ in range(20)]
        for number, key in enumerate(keys):
            key[axis] = number
        # A flip has two outcomes: 20 equal ones have a chance of 2e-6.
        assert len({changed(*key) for key in keys}) > 1


def test_generators_of_neighbors_do_not_overlap():
    draws = np.array([images.sample_rng(0, e, i).random(50) for e in range(4) for i in range(4)])
    assert len(np.unique(draws)) == draws.size


def test_a_flip_mirrors_half_of_the_time():
    image = picture(4, 6)
    outcomes = [images.flip(image, images.sample_rng(0, 0, i)) for i in range(400)]
    mirrored = sum(np.array_equal(outcome, image[:, ::-1]) for outcome in outcomes)
    assert mirrored + sum(np.array_equal(outcome, image) for outcome in outcomes) == 400
    assert 150 < mirrored < 250  # five standard deviations


def test_a_shift_reaches_every_offset_and_no_other():
    image = np.arange(1, 257, dtype=np.uint8).reshape(16, 16, 1)
    image[15, 15] = 255
    seen = set()
    for i in range(600):
        moved = images.shift(image, images.sample_rng(0, 0, i))
        row, column = np.argwhere(moved == image[8, 8])[0][:2] - 8
        seen.add((row, column))
        inside = moved[max(0, row) : 16 + min(0, row), max(0, column) : 16 + min(0, column)]
        assert np.array_equal(
            inside, image[max(0, -row) : 16 + min(0, -row), max(0, -column) : 16 + min(0, -column)]
        )
    assert seen == {(row, column) for row in range(-2, 3) for column in range(-2, 3)}


def test_random_resized_crops_have_the_promised_areas():
    areas, ratios = [], []
    for i in range(500):
        top, left, height, width = images._random_box(300, 400, images.sample_rng(0, 0, i))
        assert 0 <= top <= 300 - height and 0 <= left <= 400 - width
        areas.append(height * width / (300 * 400))
        ratios.append(width / height)
    # Sides are rounded to whole pixels: a share of 1/80 for the smallest boxes.
    assert 0.075 < min(areas) < 0.15 and 0.8 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.36


def test_opencv_uses_no_threads_of_its_own():
    assert cv2.getNumThreads() <= 1
