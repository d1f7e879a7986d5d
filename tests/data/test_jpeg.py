import io

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images, jpeg
from mxtrain.errors import BadSample

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")


def detailed(height, width, seed=0):
    """A picture with edges and noise, of which JPEG keeps most."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), dtype=np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(int)
    return np.clip(smooth + rng.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)


def encode(pixels, mode="RGB", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


@pytest.fixture(params=["libjpeg-turbo", "OpenCV"])
def decoder(request, monkeypatch):
    """With and without the library that decodes parts."""
    if request.param == "OpenCV":
        monkeypatch.setattr(jpeg, "_library", lambda: None)
    elif jpeg._library() is None:
        pytest.skip("no libjpeg-turbo 3 is installed")
    return request.param


KINDS = [
    dict(subsampling=0),
    dict(subsampling=1),
    dict(subsampling=2),
    dict(subsampling="4:1:1"),
    dict(mode="L"),
    dict(progressive=True),
    dict(restart_marker_blocks=3),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("height, width", [(150, 201), (37, 53), (1, 9), (64, 64)])
def test_a_part_has_the_bits_of_the_whole(decoder, kind, height, width):
    encoded = encode(detailed(height, width), **kind)
    whole = cv2.cvtColor(cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    picture = jpeg.opened(encoded, "a.jpg")
    assert picture.shape == whole.shape
    rng = np.random.default_rng(1)
    for _ in range(40):
        h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
        top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
        part = picture.cut((int(top), int(left), int(h), int(w)), (h, w))
        assert np.array_equal(part, whole[top : top + h, left : left + w]), (top, left, h, w)


def test_both_decoders_scale_down_to_the_same_bits(monkeypatch):
    if jpeg._library() is None:
        pytest.skip("no libjpeg-turbo 3 is installed")
    encoded = encode(detailed(301, 403))
    boxes = [((0, 0, 301, 403), f) for f in (2, 4, 8)] + [((31, 17, 203, 311), f) for f in (2, 4, 8)]
    turbo = [jpeg.opened(encoded, "a").cut(box, (box[2] // f, box[3] // f)) for box, f in boxes]
    monkeypatch.setattr(jpeg, "_library", lambda: None)
    opencv = [jpeg.opened(encoded, "a").cut(box, (box[2] // f, box[3] // f)) for box, f in boxes]
    for one, other, (box, f) in zip(turbo, opencv, boxes):
        assert np.array_equal(one, other)
        assert abs(one.shape[0] - box[2] / f) <= 1 and abs(one.shape[1] - box[3] / f) <= 1


@pytest.mark.parametrize("top", range(9))
def test_a_part_is_never_smaller_than_was_asked_for(decoder, top):
    picture = jpeg.opened(encode(detailed(70, 70)), "a")
    for factor, size in ((2, 3), (2, 5), (4, 3), (8, 7)):
        part = picture.cut((top, top, factor * size, factor * size + 1), (size, size))
        assert part.shape[0] == size and part.shape[1] >= size


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_the_decoder_scales_down_like_an_average_over_areas(decoder, factor):
    size = 64
    pixels = detailed(size * factor, size * factor)
    encoded = encode(pixels, subsampling=0, quality=95)
    scaled = images.scale(jpeg.opened(encoded, "a").cut((0, 0, size * factor, size * factor), (size, size)), size, size)
    average = cv2.resize(images.decode(encoded, "a"), (size, size), interpolation=cv2.INTER_AREA)
    error = np.abs(scaled.astype(int) - average)
    # Of 255: the transform leaves the frequencies out that an average damps. 2 to 3 is what is seen at the edges here.
    assert error.mean() < 2 and np.percentile(error, 99) <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(decoder, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(detailed(40, 60), exif=exif, subsampling=0)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))))
    picture = jpeg.opened(encoded, "a.jpg")
    assert picture.shape == upright.shape
    # Pillow has a libjpeg of its own, whose rounding may differ by one.
    whole = images.pixels(picture)
    assert np.abs(whole.astype(int) - upright).max() <= 1
    assert np.array_equal(picture.cut((5, 7, 20, 30), (20, 30)), whole[5:25, 7:37])
    assert np.array_equal(images.decode(encoded, "a.jpg"), whole)  # OpenCV agrees about the orientation


def test_what_is_cut_short_or_unusual_is_left_to_opencv():
    encoded = encode(detailed(60, 80))
    assert jpeg.opened(encoded, "a") is not None
    assert jpeg.opened(encoded[: len(encoded) // 2], "a") is None  # no end
    assert jpeg.opened(encoded[:10], "a") is None and jpeg.opened(b"", "a") is None
    assert jpeg.opened(b"\x89PNG" + encoded, "a") is None
    cmyk = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(cmyk, "JPEG")
    assert jpeg.opened(cmyk.getvalue(), "a") is None
    assert images.picture(cmyk.getvalue(), "a").shape == (8, 8, 3)


def test_a_file_cut_short_is_bad():
    encoded = encode(detailed(60, 80))
    with pytest.raises(BadSample, match="image a.jpg .*cut short"):
        images.picture(encoded[: len(encoded) // 2], "image a.jpg")


def test_junk_between_the_markers_is_bad_when_it_is_cut(decoder):
    encoded = encode(detailed(60, 80))
    start = encoded.index(b"\xff\xc0")
    broken = encoded[: start + 10] + b"\x07" * 9 + encoded[start + 19 :]  # impossible components
    picture = jpeg.opened(broken, "image a.jpg")
    with pytest.raises(BadSample, match="image a.jpg"):
        picture.cut((0, 0, 60, 80), (60, 80))


def test_damage_in_the_middle_is_said_once_with_the_name(caplog):
    if jpeg._library() is None:
        pytest.skip("no libjpeg-turbo 3 is installed")
    encoded = encode(detailed(120, 160))
    middle = len(encoded) * 2 // 3
    damaged = encoded[:middle] + b"\0" * 40 + encoded[middle + 40 :]
    whole = cv2.cvtColor(cv2.imdecode(np.frombuffer(damaged, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    for _ in range(2):
        picture = jpeg.opened(damaged, "image damaged.jpg")
        assert np.array_equal(picture.cut((0, 0, 120, 160), (120, 160)), whole)
    assert caplog.text.count("image damaged.jpg: damaged, but decoded: ") == 1


def test_nonsense_in_exif_changes_nothing():
    plain = encode(detailed(20, 30))
    for content in (b"", b"II", b"XX*\0\x08\0\0\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x09" + b"\x01\x12\0\x03\0\0\0\1\0\x2a"):
        segment = b"Exif\0\0" + content
        with_exif = plain[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + plain[2:]
        assert jpeg.read_header(with_exif) == jpeg.read_header(plain) == (20, 30, 1)
