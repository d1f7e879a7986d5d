import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import augment
from mxtrain.data.augment import OPERATIONS, Changes, change
from mxtrain.data.images import sample_rng
from trainings import MLP, arrays, assert_same_bits, image_folder, metrics, train_program

train = pytest.fixture(train_program)

ALL = Changes(rand_augment=(2, 9), color_jitter=0.4, hue=0.1, lighting=0.1, random_erasing=0.5)
GRAY = ALL._replace(hue=0.0, lighting=0.0)
LUMA = np.array([0.299, 0.587, 0.114])


def noise(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height, width, channels=3):
    """Changes by at most 4 from pixel to pixel."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 40 * np.sin(x / 20 + c) + 40 * np.cos(y / 20 - c) for c in range(channels)]
    return np.stack(waves, axis=-1).astype(np.uint8)


# All of them


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3), (17, 23), (60, 60)])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_argument_are_kept(shape, channels):
    image = noise(*shape, channels)
    before = image.copy()
    image.setflags(write=False)  # as a file that is mapped into memory
    changed = [op(image, level) for op in OPERATIONS.values() for level in (-1, -0.3, 0, 0.5, 1)]
    changed += [change(image[:, ::-1], ALL if channels == 3 else GRAY, 0, 0, i) for i in range(30)]
    for result in changed:
        assert result.shape == image.shape and result.dtype == np.uint8
    assert np.array_equal(image, before)


def test_the_same_key_gives_the_same_pixels():
    image = noise(20, 20)
    assert np.array_equal(change(image, ALL, 1, 2, 3), change(image, ALL, 1, 2, 3))
    for axis in range(3):
        keys = [[1, 2, 3] for _ in range(4)]
        for number, key in enumerate(keys):
            key[axis] += number
        assert len({change(image, ALL, *key).tobytes() for key in keys}) == 4


@pytest.mark.parametrize("changes", [Changes(), *(Changes(**{f: getattr(ALL, f)}) for f in Changes._fields)])
def test_each_change_is_on_when_it_is_asked_for(changes):
    image = noise(20, 20)
    same = [np.array_equal(change(image, changes, 0, 0, i), image) for i in range(20)]
    assert all(same) if changes == Changes() else not all(same)


@pytest.mark.parametrize("others", [ALL, ALL._replace(rand_augment=(5, 3)), Changes(hue=0.2), Changes(lighting=0.1)])
def test_one_change_does_not_shift_the_numbers_of_another(others):
    image = np.full((20, 20, 3), 100, np.uint8)
    for i in range(5):
        alone = change(image, Changes(random_erasing=1.0), 0, 0, i)
        erased = alone != 100
        assert erased.any()
        result = change(image, others._replace(random_erasing=1.0), 0, 0, i)
        assert np.array_equal(result[erased], alone[erased])


def test_every_change_has_its_own_numbers(monkeypatch):
    drawn = []
    for name in ("rand_augment", "color_jitter", "lighting", "random_erasing"):
        monkeypatch.setattr(augment, name, lambda image, *rest: drawn.append(rest[-1].random(5)) or image)
    change(noise(2, 2), ALL, 1, 2, 3)
    drawn.append(sample_rng(1, 2, 3).random(5))  # what cuts and mirrors
    assert len(np.unique(drawn)) == 25


# Color


def recolored_step_by_step(image, brightness, contrast, saturation, hue, order):
    """In float64, without clipping. image: (h, w, 3)."""
    x = image.astype(float)
    for step in order:
        luma = x @ LUMA
        if step == "brightness":
            x = x * brightness
        elif step == "contrast":
            x = luma.mean() + contrast * (x - luma.mean())
        elif step == "saturation":
            x = luma[..., None] + saturation * (x - luma[..., None])
        else:
            plane = x @ [0.5959, -0.2746, -0.3213] + 1j * (x @ [0.2115, -0.5227, 0.3112])
            plane = plane * np.exp(2j * np.pi * hue)
            yiq = np.stack([luma, plane.real, plane.imag], axis=-1)
            x = yiq @ np.linalg.inv([LUMA, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]).T
    return x


@pytest.mark.parametrize("seed", range(6))
def test_recoloring_is_the_four_steps_in_any_order(seed):
    rng = np.random.default_rng(seed)
    factors = (*rng.uniform(0.5, 1.5, 3), rng.uniform(-0.5, 0.5))
    order = rng.permutation(["brightness", "contrast", "saturation", "hue"])
    image = noise(30, 41, seed=seed)
    expected = np.clip(recolored_step_by_step(image, *factors, order), 0, 255)
    # 0.5 for rounding; three factors in units of 1/1024: 3 * 255 / 2048.
    assert np.abs(augment.recolored(image, *factors) - expected).max() <= 0.5 + 3 * 255 / 2048 + 0.01


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_and_contrast_are_rounded_to_the_nearest(channels):
    image = noise(30, 41, channels)
    mean = image.mean() if channels == 1 else (image.astype(float) @ LUMA).mean()
    expected = np.clip(1.3 * (mean + 0.6 * (image.astype(float) - mean)), 0, 255)
    assert np.abs(augment.recolored(image, 1.3, 0.6) - expected).max() <= 0.5 + 1e-9


def test_one_channel_has_no_color():
    image = noise(10, 10, 1)
    assert np.array_equal(augment.recolored(image, saturation=0.2, hue=0.3), image)


def test_hue_keeps_grays_and_a_full_turn_is_nothing():
    image = noise(20, 20)
    gray = np.repeat(image[..., :1], 3, axis=2)
    assert np.abs(augment.recolored(gray, hue=0.3).astype(int) - gray).max() <= 1
    assert np.abs(augment.recolored(image, hue=1.0).astype(int) - image).max() <= 1
    assert np.abs(augment.recolored(image, hue=0.3).astype(int) - image).max() > 50


def test_jitter_draws_evenly_from_its_range():
    # One gray pixel is its own mean luma and has no color: only the brightness acts, in steps of 1/100.
    image = np.full((1, 1, 1), 100, np.uint8)
    factors = [augment.color_jitter(image, 0.4, 0.1, sample_rng(0, 0, i))[0, 0, 0] / 100 for i in range(2000)]
    assert min(factors) == pytest.approx(0.6, abs=0.006) and max(factors) == pytest.approx(1.4, abs=0.006)
    # Each quarter is hit 500 times; five standard deviations are 97. (A border's values fall to one side.)
    assert np.abs(np.histogram(factors, bins=[0.595, 0.795, 0.995, 1.195, 1.41])[0] - 500).max() < 105


def test_jitter_draws_each_factor_by_itself(monkeypatch):
    drawn = []
    monkeypatch.setattr(augment, "recolored", lambda image, *factors: drawn.append(factors))
    for i in range(1000):
        augment.color_jitter(None, 0.4, 0.1, sample_rng(0, 0, i))
    drawn = np.array(drawn)
    assert np.allclose(drawn.min(axis=0), [0.6, 0.6, 0.6, -0.1], atol=0.01)
    assert np.allclose(drawn.max(axis=0), [1.4, 1.4, 1.4, 0.1], atol=0.01)
    # The correlation of 1,000 independent pairs deviates by 0.03; five of those.
    assert np.abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.16


def test_lighting_has_imagenets_covariance():
    image = np.full((1, 1, 3), 128, np.uint8)
    added = np.array([augment.lighting(image, 0.3, sample_rng(0, 0, i))[0, 0].astype(float) - 128 for i in range(4000)])
    # AlexNet's numbers, as others print them: eigenvalues as deviations for 0..255, eigenvectors in columns.
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    expected = vectors @ np.diag((0.3 * np.array([55.46, 4.794, 1.148])) ** 2) @ vectors.T
    # A variance out of 4,000 has a relative deviation of 2.2%: five of those, and 1/12 for rounding.
    assert np.abs(np.cov(added.T) - expected).max() < 0.11 * expected.max() + 1 / 12
    assert np.abs(added.mean(axis=0)).max() < 5 * np.sqrt(expected.max() / 4000)


def test_lighting_adds_one_color_clipped():
    image = noise(20, 20)
    for i in range(20):
        color = augment.lighting(np.full((1, 1, 3), 128, np.uint8), 0.3, sample_rng(0, 0, i)).astype(int) - 128
        expected = np.clip(image + color, 0, 255)
        assert np.array_equal(augment.lighting(image, 0.3, sample_rng(0, 0, i)), expected)


# RandAugment's operations


def bilinear(image, source):
    """image at source(x, y) -> (x, y), in float64; gray of 128 outside."""
    height, width = image.shape[:2]
    padded = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)), constant_values=128)
    y, x = np.mgrid[:height, :width].astype(float)
    x, y = source(x, y)
    x, y = np.clip(x, -1, width) + 1, np.clip(y, -1, height) + 1
    left, top = np.minimum(x.astype(int), width), np.minimum(y.astype(int), height)
    a, b = (x - left)[..., None], (y - top)[..., None]
    above = (1 - a) * padded[top, left] + a * padded[top, left + 1]
    below = (1 - a) * padded[top + 1, left] + a * padded[top + 1, left + 1]
    return (1 - b) * above + b * below


def assert_warped(result, image, source):
    expected = bilinear(image, source)
    wrong = np.abs(result - expected)
    # OpenCV rounds places to 1/32 of a pixel: 1/64 off in x and y, times 4 per pixel, and 0.5 for rounding.
    # At the image's border the step to the gray outside is up to 128 instead.
    inside = np.abs(bilinear(np.full_like(image, 255), source) - 255).max(axis=-1) < 1e-9
    assert inside.mean() > 0.4 and wrong[inside].max() <= 0.5 + 2 * 4 / 64 + 0.1
    assert wrong.max() <= 0.5 + 2 * 128 / 64 + 0.1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("degrees", [-30, -7, 12.5, 30])
def test_rotations_turn_around_the_center(channels, degrees):
    image = smooth(60, 81, channels)
    sine, cosine = np.sin(np.radians(degrees)), np.cos(np.radians(degrees))
    # Counterclockwise on the screen, where y points down.
    assert_warped(augment.rotate(image, degrees), image, lambda x, y: (
        40 + cosine * (x - 40) - sine * (y - 29.5), 29.5 + sine * (x - 40) + cosine * (y - 29.5)))


@pytest.mark.parametrize("amount", [-0.3, 0.1, 0.3])
def test_shears_keep_the_corner(amount):
    image = smooth(60, 81)
    assert_warped(augment.shear(image, amount, 0), image, lambda x, y: (x + amount * (y + 0.5), y))
    assert_warped(augment.shear(image, 0, amount), image, lambda x, y: (x, y + amount * (x + 0.5)))


def test_a_quarter_turn_is_exact():
    image = noise(15, 15)
    assert np.array_equal(augment.rotate(image, 90), np.rot90(image))


@pytest.mark.parametrize("right, down", [(0, 0), (3, 0), (-3, 2), (0, -8), (8, 12), (-50, 50)])
def test_translations_move_whole_pixels(right, down):
    image = noise(8, 12)
    expected = np.full_like(image, 128)
    for y in range(8):
        for x in range(12):
            if 0 <= y - down < 8 and 0 <= x - right < 12:
                expected[y, x] = image[y - down, x - right]
    assert np.array_equal(augment.translate(image, right, down), expected)


def test_sharpness_is_a_blend_with_the_smoothed_image():
    image = noise(20, 30)
    x = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)), mode="edge")
    smoothed = sum(x[i : i + 20, j : j + 30] for i in range(3) for j in range(3)) + 4 * image.astype(float)
    smoothed[1:-1, 1:-1] /= 13
    smoothed[[0, -1]], smoothed[:, [0, -1]] = image[[0, -1]], image[:, [0, -1]]
    for factor in (0.1, 0.7, 1.9):
        expected = np.clip(smoothed + factor * (image - smoothed), 0, 255)
        assert np.abs(augment.sharpen(image, factor) - expected).max() <= 0.5 + 1e-3  # float32 sums


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("autocontrast", "equalize")])
def test_level_zero_changes_nothing(name):
    image = noise(20, 20)
    assert np.array_equal(OPERATIONS[name](image, 0.0), image)


def test_level_one_is_the_papers_largest():
    image, gray = noise(20, 40), np.full((20, 40, 3), 100, np.uint8)
    for sign in (-1, 1):
        assert np.array_equal(OPERATIONS["solarize"](image, sign), 255 - image)
        assert np.array_equal(OPERATIONS["posterize"](image, sign), image // 16 * 16)
        assert np.array_equal(OPERATIONS["rotate"](image, sign), augment.rotate(image, sign * 30))
        assert np.array_equal(OPERATIONS["brightness"](gray, sign), np.full_like(gray, 100 + sign * 90))
        assert np.array_equal(OPERATIONS["translate_x"](image, sign), augment.translate(image, sign * 18, 0))
        assert np.array_equal(OPERATIONS["translate_y"](image, sign), augment.translate(image, 0, sign * 9))
        assert np.array_equal(OPERATIONS["shear_x"](image, sign), augment.shear(image, sign * 0.3, 0))
        assert np.array_equal(OPERATIONS["shear_y"](image, sign), augment.shear(image, 0, sign * 0.3))


IMAGES = {"noise": noise(40, 50), "narrow": noise(40, 50) // 4 + 90, "constant": np.full((9, 9, 3), 77, np.uint8),
          "tiny": noise(3, 3), "two": np.repeat(noise(20, 30) // 128 * 200, 1, axis=0), "gray": noise(30, 30, 1)}


@pytest.mark.parametrize("name", IMAGES)
def test_operations_agree_with_pillow(name):
    pil, ops, enhance = (pytest.importorskip(f"PIL.{part}") for part in ("Image", "ImageOps", "ImageEnhance"))
    image = IMAGES[name]
    picture = pil.fromarray(image if image.shape[2] == 3 else image[..., 0])

    def apart(result, theirs):
        return np.abs(result.astype(int) - np.asarray(theirs).reshape(image.shape)).max()

    assert apart(augment.equalize(image), ops.equalize(picture)) == 0
    for threshold in (0, 1, 100, 256):
        assert apart(augment.solarize(image, threshold), ops.solarize(picture, threshold)) == 0
    for bits in range(1, 9):
        assert apart(augment.posterize(image, bits), ops.posterize(picture, bits)) == 0
    # Pillow cuts off where we round, and it rounds in between: gray, the mean, the smoothed image.
    assert apart(augment.autocontrast(image), ops.autocontrast(picture)) <= 1
    for factor in (0.1, 0.5, 1.3, 1.9):
        assert apart(augment.recolored(image, brightness=factor), enhance.Brightness(picture).enhance(factor)) <= 1
        assert apart(augment.recolored(image, contrast=factor), enhance.Contrast(picture).enhance(factor)) <= 2
        assert apart(augment.recolored(image, saturation=factor), enhance.Color(picture).enhance(factor)) <= 2
        assert apart(augment.sharpen(image, factor), enhance.Sharpness(picture).enhance(factor)) <= 1


def test_warps_agree_with_pillow():
    pil = pytest.importorskip("PIL.Image")
    image = smooth(60, 81)
    picture, linear = pil.fromarray(image), pil.Resampling.BILINEAR
    center = slice(20, 40), slice(20, 60)
    for degrees in (-20, 20):
        theirs = np.asarray(picture.rotate(degrees, linear)).astype(int)
        # Both interpolate between values 4 apart, in steps of 1/32 or exactly, and Pillow cuts off.
        assert np.abs(augment.rotate(image, degrees) - theirs)[center].max() <= 2
    theirs = np.asarray(picture.transform(picture.size, pil.Transform.AFFINE, (1, 0.2, 0, 0, 1, 0), linear)).astype(int)
    assert np.abs(augment.shear(image, 0.2, 0) - theirs)[center].max() <= 2


def test_rand_augment_draws_all_operations_evenly_and_both_directions(monkeypatch):
    drawn = []

    def recording(name):
        return lambda image, level: drawn.append((name, level)) or image

    monkeypatch.setattr(augment, "OPERATIONS", {name: recording(name) for name in OPERATIONS})
    for i in range(1400):
        augment.rand_augment(None, 2, 9, sample_rng(0, 0, i))
    assert len(OPERATIONS) == 14 and len(drawn) == 2800 and {level for _, level in drawn} == {-0.9, 0.9}
    # 200 of each, with a standard deviation of 13.6, and 1,400 upwards, with one of 26.5: five of those.
    counts = [sum(name == other for other, _ in drawn) for name in OPERATIONS]
    assert np.abs(np.array(counts) - 200).max() < 68
    assert abs(sum(level > 0 for _, level in drawn) - 1400) < 133
    # The second operation is the first one in every 14th image: 100 times, deviation 9.6.
    assert abs(sum(drawn[i][0] == drawn[i + 1][0] for i in range(0, 2800, 2)) - 100) < 48


# Erasing


def test_erasing_happens_with_its_probability():
    image = np.zeros((20, 20, 3), np.uint8)
    erased = sum(augment.random_erasing(image, 0.3, sample_rng(0, 0, i)).any() for i in range(1000))
    assert abs(erased - 300) < 73  # five standard deviations


@pytest.mark.parametrize("size", [(224, 224), (100, 300), (300, 100)])
def test_erased_boxes_have_the_promised_areas_and_ratios(size):
    boxes = np.array([augment._erased_box(*size, sample_rng(0, 0, i)) for i in range(1500)])
    top, left, height, width = boxes.T
    below, beside = size[0] - top - height, size[1] - left - width
    assert all(room.min() == 0 for room in (top, left, below, beside))
    areas, ratios = height * width / (size[0] * size[1]), width / height
    # Sides are whole pixels: the smallest box has one of 14 pixels.
    assert 0.018 < areas.min() < 0.025 and 0.32 < areas.max() < 0.34
    assert abs(areas.mean() - 0.175) < 5 * 0.31 / np.sqrt(12 * 1500) + 0.002
    assert 0.28 < ratios.min() < 0.36 and 2.8 < ratios.max() < 3.6


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (500, 2), (3, 3)])
def test_erasing_fits_images_of_any_shape(size):
    for i in range(200):
        top, left, height, width = augment._erased_box(*size, sample_rng(0, 0, i))
        assert 0 <= top < top + height <= size[0] and 0 <= left < left + width <= size[1]


def test_erased_pixels_are_even_and_the_others_stay():
    image = np.full((100, 100, 3), 7, np.uint8)
    result = augment.random_erasing(image, 1.0, sample_rng(0, 0, 0))
    rows, columns = np.flatnonzero((result != 7).any((1, 2))), np.flatnonzero((result != 7).any((0, 2)))
    box = result[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert 0.02 <= box.size / result.size <= 0.34
    assert (result == 7).sum() - (box == 7).sum() == result.size - box.size
    pixels = augment._noise((500, 256, 3), sample_rng(0, 0, 0))
    counts = np.bincount(pixels.ravel(), minlength=256)
    # Chi-square with 255 degrees of freedom: mean 255, deviation 22.6.
    assert abs(((counts - 1500) ** 2 / 1500).sum() - 255) < 5 * 22.6
    # Neighbors come out of one number in part: they are independent all the same. 384,000 pairs, deviation 0.0016.
    flat = pixels.ravel().astype(float)
    for lag in (1, 2, 3, 6):
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 0.008


# A training


def test_workers_and_contexts_change_no_bit(train, tmp_path):
    data = image_folder(tmp_path / "pictures", 24, side=16)
    flags = ["--data", data, "--image-size", 12, *MLP, "--batch-size", 10, "--epochs", 2, "--exact", "--shards", 4,
             "--color-jitter", 0.4, "--hue", 0.1, "--lighting", 0.1, "--rand-augment", "2,9", "--random-erasing", 0.5]
    runs = {"one": [], "workers": ["--workers", 2], "contexts": ["--workers", 2, "--cpus", 2]}
    for name, more in runs.items():
        code, _, stderr = train(*flags, *more, "--out", tmp_path / name)
        assert code == 0, stderr
        assert "crop, rand_augment 2,9, color_jitter 0.4, hue 0.1, lighting 0.1, random_erasing 0.5" in stderr
        assert_same_bits(arrays(tmp_path / name), arrays(tmp_path / "one"))
        assert [row["loss"] for row in metrics(tmp_path / name)] == [row["loss"] for row in metrics(tmp_path / "one")]
    code, _, stderr = train(*flags[: flags.index("--color-jitter")], "--out", tmp_path / "plain")
    assert code == 0, stderr
    plain, one = arrays(tmp_path / "plain"), arrays(tmp_path / "one")
    assert any(not np.array_equal(plain[name], one[name]) for name in plain)
