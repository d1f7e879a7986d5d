"""Record files as data: the same samples as the folder's, and what is refused (entry D24 of the field reports)."""

import hashlib
import io
import threading

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxnet import recordio
from mxtrain.data.loader import Loader
from mxtrain.data.make_records import RecordsConfig, make_records
from mxtrain.data.records import RecordDataset, open_part, verify
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data, open_source
from mxtrain.errors import BadSample, UserError
from mxtrain.train.main import main as train_main


def picture(seed, height=20, width=24):
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype("uint8")


def png(seed, height=20, width=24):
    return cv2.imencode(".png", picture(seed, height, width)[..., ::-1])[1].tobytes()


def make_folder(root, classes=("ant", "bee"), count=6):
    """PNG and JPEG files, of which training may decode no more than a part."""
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            ending = ("png", "jpg")[i % 2]
            cv2.imwrite(str(root / name / f"{i}.{ending}"), picture(100 * number + i, 40 + 9 * i, 70 - 5 * i))
    return str(root)


def write(stem, labels, contents=None, index=True):
    """A record file as MXNet writes it."""
    contents = contents or [png(i) for i in range(len(labels))]
    if index:
        writer = recordio.MXIndexedRecordIO(f"{stem}.idx", f"{stem}.rec", "w")
    else:
        writer = recordio.MXRecordIO(f"{stem}.rec", "w")
    for i, (label, content) in enumerate(zip(labels, contents)):
        record = recordio.pack(recordio.IRHeader(0, label, i, 0), content)
        writer.write_idx(i, record) if index else writer.write(record)
    writer.close()
    return f"{stem}.rec"


def config(data, **settings):
    return DataConfig(data=str(data), image_size=16, **settings)


def multiset(dataset, workers, shuffle="full"):
    """A digest of the (label, pixels) that a loader delivers, in whatever order."""
    loader = Loader(dataset, 5, seed=1, shuffle=shuffle, workers=workers)
    try:
        pairs = [(int(label), image.tobytes()) for x, y in loader.batches(3) for image, label in zip(x, y)]
    finally:
        loader.close()
    return hashlib.sha256(repr(sorted(pairs)).encode()).hexdigest(), len(pairs)


def refused(data, text, **settings):
    with pytest.raises(UserError, match=text) as error:
        open_data(config(data, **settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_records_deliver_the_samples_of_the_folder(tmp_path, workers):
    folder = make_folder(tmp_path / "train", count=9)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r"), workers=2))
    expected, found = open_data(config(folder), seed=4), open_data(config(tmp_path / "r"), seed=4)
    assert found.classes == expected.classes and found.name == "records"
    for part in ("train", "val"):
        count = len(getattr(expected, part))
        assert multiset(getattr(found, part), workers) == multiset(getattr(expected, part), 0)
        assert multiset(getattr(found, part), workers)[1] == count > 0


def test_records_are_at_the_places_of_the_folder(tmp_path):
    """So that training from either gives the same weights, augmentation included."""
    folder = make_folder(tmp_path / "train", count=9)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    expected, found = open_data(config(folder), seed=4), open_data(config(tmp_path / "r.rec"), seed=4)
    for part in ("train", "val"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        for i in range(len(theirs)):
            assert np.array_equal(ours[2, i][0], theirs[2, i][0]) and ours[2, i][1] == theirs[2, i][1]


def test_a_folder_with_parts_and_its_records(tmp_path):
    make_folder(tmp_path / "images" / "train", ("1", "10", "2"))
    make_folder(tmp_path / "images" / "val", ("10", "2"), count=2)
    make_records(RecordsConfig(data=str(tmp_path / "images"), out=str(tmp_path / "r")))
    data = open_data(config(tmp_path / "r"))
    assert data.classes == ["1", "10", "2"] and (len(data.train), len(data.val)) == (18, 4)
    assert [int(data.val[0, i][1]) for i in range(4)] == [1, 1, 2, 2]
    text = "\n".join(data.notes)
    assert "no validation images of class '1'" in text and "sorted as text" in text
    both = open_data(config(tmp_path / "r" / "train.rec", val=str(tmp_path / "r" / "val")))
    assert both.fingerprint == data.fingerprint and "has no effect" not in "\n".join(both.notes)


@pytest.mark.parametrize("workers", [0, 2])
def test_mxnets_files_are_read_with_and_without_an_index(tmp_path, workers):
    write(tmp_path / "a", [0, 1, 2] * 4)
    write(tmp_path / "b", [0, 1, 2] * 4, index=False)
    with_index, without = (open_data(config(tmp_path / name, val_split=0)) for name in "ab")
    assert with_index.classes == ["0", "1", "2"] and len(with_index.train) == 12
    assert multiset(without.train, workers) == multiset(with_index.train, 0)
    assert any("b.idx: is missing; the 12 records were found" in note for note in without.notes)
    assert not any("idx" in note for note in with_index.notes)
    assert any("a.classes.txt: is not there; the classes are called by their numbers" in n for n in with_index.notes)


def test_an_index_may_be_in_another_order(tmp_path):
    rec = write(tmp_path / "a", [0, 1, 2, 3])
    expected = multiset(open_data(config(rec, val_split=0)).train, 0)
    lines = (tmp_path / "a.idx").read_text().splitlines(keepends=True)
    (tmp_path / "a.idx").write_text("".join(reversed(lines)))
    data = open_data(config(rec, val_split=0))
    assert multiset(data.train, 0) == expected and data.train.describe(0).endswith("a.rec, record 0")


def test_an_index_of_another_file_is_refused(tmp_path):
    rec = write(tmp_path / "a", [0, 1, 2, 3])
    for other in ([0, 1, 2, 3, 4], [0, 1, 2]):
        write(tmp_path / "b", other, [png(9 + i, 5 + i) for i in range(len(other))])
        (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
        refused(rec, r"a.idx: record 1 at byte \d+: no record of .*a.rec begins there")
    write(tmp_path / "a", [0, 1, 2])
    index = (tmp_path / "a.idx").read_bytes()
    write(tmp_path / "a", [0, 1, 2, 3])
    (tmp_path / "a.idx").write_bytes(index)
    refused(rec, "a.idx: names 3 records in 3 lines, but .*a.rec holds 4")
    (tmp_path / "a.idx").write_bytes(index + index)
    refused(rec, "a.idx: names 3 records in 6 lines")
    (tmp_path / "a.idx").write_text("0\t0\n0\t99999999\n")
    refused(rec, "record 0 should begin at byte 99999999")
    (tmp_path / "a.idx").write_text("")
    refused(rec, "a.idx: names 0 records")


def test_a_file_cut_short_is_refused(tmp_path):
    rec = write(tmp_path / "a", [0, 1] * 3)
    content = (tmp_path / "a.rec").read_bytes()
    for kept in (len(content) - 1, len(content) // 2 + 20, 5):
        (tmp_path / "a.rec").write_bytes(content[:kept])
        refused(rec, r"a.rec: record \d, at byte \d+ of \d+: the file is cut short here")
    (tmp_path / "a.rec").write_bytes(content[: len(content) // 2])  # between two records
    refused(rec, r"a.rec: is cut short, or .*a.idx is another file's: record 3 should begin at byte")
    (tmp_path / "a.rec").write_bytes(b"")
    refused(rec, "a.rec: holds no records")
    (tmp_path / "a.rec").write_bytes(b"\xff\xd8\xff\xe0" * 100)
    refused(rec, "a.rec: record 0, at byte 0 of 400: no record begins here")


@pytest.mark.parametrize("label, text", [(1.5, "record 2: label 1.5; labels must be whole"), (-1, "record 2: label -1"),
                                         (float("nan"), "record 2: label nan"), ([1.0, 0.0], "record 2: has 2 labels")])
def test_labels_that_are_no_class_numbers_are_refused(tmp_path, label, text):
    refused(write(tmp_path / "a", [0, 1, label]), f"a.rec, {text}")


def test_one_label_in_a_list_is_a_label(tmp_path):
    data = open_data(config(write(tmp_path / "a", [[0.0], [1.0], [1.0]]), val_split=0))
    assert [int(data.train[0, i][1]) for i in range(3)] == [0, 1, 1]


def test_class_names_beside_the_file(tmp_path):
    rec, val = write(tmp_path / "a", [0, 2] * 4), write(tmp_path / "b", [2, 0])
    (tmp_path / "a.classes.txt").write_text("ant\nbee\ncat\n")
    data = open_data(config(rec, val=val))  # without names of its own, it has the training part's
    assert data.classes == ["ant", "cat"] and [int(data.val[0, i][1]) for i in range(2)] == [1, 0]
    assert any("no images of class 'bee', which is left out" in note for note in data.notes)
    (tmp_path / "b.classes.txt").write_text("cat\nbee\nant\n")
    assert [int(open_data(config(rec, val=val)).val[0, i][1]) for i in range(2)] == [0, 1]
    (tmp_path / "b.classes.txt").write_text("cat\nbee\nwasp\n")
    refused(rec, "b.rec: class 'wasp' has no training images; the classes are 'ant', 'cat'", val=val)
    (tmp_path / "a.classes.txt").write_text("ant\nbee\n")
    refused(rec, "a.rec, record 1: label 2 has no name: the list of classes has 2")


def test_validation_labels_without_names(tmp_path):
    rec = write(tmp_path / "a", [3, 7] * 4)
    data = open_data(config(rec, val=write(tmp_path / "b", [7])))
    assert data.classes == ["3", "7"] and int(data.val[0, 0][1]) == 1
    assert any("no validation images of class '3'" in note for note in data.notes)
    refused(rec, "class '4' has no training images", val=write(tmp_path / "c", [4]))


def test_what_validates_must_be_records_too(tmp_path):
    rec, folder = write(tmp_path / "a", [0, 1]), make_folder(tmp_path / "f")
    refused(rec, "--val .*: is a folder of images, but --data .* is a record file", val=folder)
    refused(folder, "--val .*: is a record file, but --data .* is a folder of images", val=rec)
    refused(tmp_path / "gone.rec", "gone.rec: does not exist")
    refused(tmp_path / "gone", "gone: does not exist; expected")
    refused(write(tmp_path / "one", [1, 1]), "only one class, '1'")
    refused(rec, "--val-split 0 to train without")


def test_a_folder_of_record_files(tmp_path):
    write(tmp_path / "only", [0, 1] * 3)
    assert len(open_data(config(tmp_path, val_split=0)).train) == 6
    write(tmp_path / "other", [0, 1] * 3)
    refused(tmp_path, "holds 'only.rec', 'other.rec' but no train.rec")
    write(tmp_path / "train", [0, 1] * 2)
    write(tmp_path / "val", [0, 1])
    data = open_data(config(tmp_path))
    assert (len(data.train), len(data.val)) == (4, 2)
    assert any("not used: 'only.rec', 'other.rec'" in note for note in data.notes)
    data = open_data(config(tmp_path, val=str(tmp_path / "only.rec")))
    assert len(data.val) == 6 and any("val.rec: not used, because of --val" in note for note in data.notes)
    (tmp_path / "ants").mkdir()  # a folder of images that records were put into
    assert any("not used: 'only.rec', 'other.rec', 'ants'" in note for note in open_data(config(tmp_path)).notes)


def test_a_bad_payload_is_named(tmp_path):
    arrays = [io.BytesIO() for _ in range(3)]
    for file, array in zip(arrays, (np.zeros((4, 4, 3)), np.zeros((4, 4, 2), "uint8"), np.array([None]))):
        np.save(file, array, allow_pickle=True)
    jpeg = cv2.imencode(".jpg", picture(3, 200, 200))[1].tobytes()
    contents = [png(0), b"no image", b"", png(1)[:60], jpeg[: len(jpeg) // 2]]
    contents += [*(file.getvalue() for file in arrays), arrays[0].getvalue()[:20]]
    rec = write(tmp_path / "a", [i % 2 for i in range(len(contents))], contents)
    train = open_data(config(rec, val_split=0)).train
    assert train[0, 0][0].shape == (16, 16, 3)
    for i in range(1, len(contents)):
        with pytest.raises(BadSample, match=f"a.rec, record {i}"):
            train[0, i]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_left_out_on_request(tmp_path, workers):
    contents = [png(i) for i in range(9)] + [b"no image"]
    train = open_data(config(write(tmp_path / "a", [0, 1] * 5, contents), val_split=0)).train
    loader = Loader(train, 4, workers=workers, on_bad="skip")
    batches = list(loader.batches(0))
    loader.close()
    assert len(batches) == 3 and sum(len(y) for _, y in batches) == 9
    loader = Loader(train, 4, workers=workers)
    with pytest.raises(UserError, match="a.rec, record 9"):
        list(loader.batches(0))
    loader.close()


def test_training_from_records_and_from_the_folder_gives_the_same_weights(tmp_path):
    folder = make_folder(tmp_path / "f", count=9)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    weights = []
    for number, data in enumerate((folder, tmp_path / "r")):
        run = tmp_path / f"run{number}"
        flags = ["--image-size", "16", "--model", "mlp", "--epochs", "2", "--batch-size", "4", "--workers", str(number)]
        quiet = ["--no-progress", "--no-plots", "--no-tensorboard"]
        assert train_main(["--data", str(data), "--out", str(run), *flags, *quiet]) == 0
        (path,) = run.glob("checkpoints/update-00000008/arrays.npz")
        weights.append(dict(np.load(path)))
    assert weights[0].keys() == weights[1].keys() and len(weights[0]) > 4
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_raw_pixels_are_delivered_as_they_are(tmp_path):
    images = [picture(0), picture(1)[..., 0], picture(2)[..., :1]]
    contents = []
    for image in images:
        file = io.BytesIO()
        np.save(file, image)
        contents.append(file.getvalue())
    source = open_source(config(write(tmp_path / "a", [0, 1, 1], contents), val_split=0))
    for i, image in enumerate(images):
        image = image if image.ndim == 3 else image[..., np.newaxis]
        assert np.array_equal(source.train[0, i][0], np.broadcast_to(image, (20, 24, 3)))


def test_a_file_that_changes_under_the_training_is_noticed(tmp_path):
    rec = write(tmp_path / "a", [0, 1, 0, 1], [png(7)] * 4)
    train = open_data(config(rec, val_split=0)).train
    with open(rec, "r+b") as file:  # the same size, other labels
        content = open(write(tmp_path / "b", [1, 0, 1, 0], [png(7)] * 4), "rb").read()
        file.write(content)
    with pytest.raises(UserError, match="a.rec, record 0: has the label 1 and not 0") as error:
        train[0, 0]
    assert not isinstance(error.value, BadSample)  # nothing to skip: every label may be wrong
    with open(rec, "r+b") as file:
        file.truncate(len(content) // 2)
    with pytest.raises(BadSample, match="a.rec, record 3: cut short"):
        train[0, 3]


def test_threads_read_one_file_at_once(tmp_path):
    part = open_part(write(tmp_path / "a", [i % 5 for i in range(40)]))
    dataset = RecordDataset(part, np.arange(40), part.labels.astype(np.int32))
    wrong = []

    def read(seed):
        for i in np.random.RandomState(seed).permutation(40):
            image, label = dataset[0, i]
            if not np.array_equal(image, picture(i)) or label != i % 5:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fingerprint_is_that_of_the_samples(tmp_path):
    def prints(path):
        return open_data(config(path)).fingerprint

    folder = make_folder(tmp_path / "f", count=9)
    for name in "ab":
        (tmp_path / name).mkdir()
        make_records(RecordsConfig(data=folder, out=str(tmp_path / name / "r")))
    assert prints(tmp_path / "a/r") == prints(tmp_path / "b/r")
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "c"), encoding="jpeg"))
    foreign = [prints(write(tmp_path / "d", labels)) for labels in ([0, 1] * 3, [0, 1] * 3, [1, 0] * 3)]
    assert foreign[0] == foreign[1] and len({prints(tmp_path / "a/r"), prints(tmp_path / "c"), *foreign}) == 4


def test_a_bit_that_flipped_is_found_by_the_checksum(tmp_path):
    make_records(RecordsConfig(data=make_folder(tmp_path / "f"), out=str(tmp_path / "r")))
    verify(str(tmp_path / "r"))
    content = bytearray((tmp_path / "r.rec").read_bytes())
    content[-100] ^= 1
    (tmp_path / "r.rec").write_bytes(content)
    with pytest.raises(UserError, match="r.rec: is damaged: its checksum is not that in .*r.json"):
        verify(str(tmp_path / "r"))


def test_what_make_records_said_is_used_only_for_its_own_file(tmp_path):
    folder = make_folder(tmp_path / "f")
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert open_part(str(tmp_path / "r")).checksum
    write(tmp_path / "r", [0, 1] * 4)  # by another program, under the same name
    part = open_part(str(tmp_path / "r"))
    assert part.checksum is None and part.labels.tolist() == [0, 1] * 4 and part.names is None
    assert "r.json: does not belong to" in part.notes[0]
