"""make_records.py: what it writes, for whom it is readable, and what a killed run leaves."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cv2
import mxnet as mx
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxnet import recordio
from mxtrain.data import images, make_records as program
from mxtrain.data.make_records import RecordsConfig, main, make_records
from mxtrain.data.record_files import paths_of
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_source
from mxtrain.errors import TrainingError, UserError

ROOT = Path(__file__).parents[2]


def make_folder(root, classes=("ant", "bee"), count=4, endings=("png", "jpg")):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.RandomState(100 * number + i).randint(0, 256, (40 + i, 50 - i, 3)).astype("uint8")
            cv2.imwrite(str(root / name / f"{i}.{endings[i % len(endings)]}"), pixels)
    return str(root)


def contents(stem):
    return [Path(path).read_bytes() if os.path.exists(path) else None for path in paths_of(str(stem))]


def hidden(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def refused(text, **settings):
    with pytest.raises(UserError, match=text) as error:
        make_records(RecordsConfig(**settings))
    assert "\n" not in str(error.value)


def read_by_mxnet(stem):
    reader = recordio.MXIndexedRecordIO(f"{stem}.idx", f"{stem}.rec", "r")
    return [(key, *recordio.unpack(reader.read_idx(key))) for key in reader.keys]


@pytest.mark.parametrize("encoding", ["as-is", "jpeg"])
def test_mxnet_reads_the_file(tmp_path, encoding):
    folder = make_folder(tmp_path / "f")
    (file,) = make_records(RecordsConfig(data=folder, out=str(tmp_path / "r"), encoding=encoding))
    assert file["records"] == 8 and file["skipped"] == 0 and file["bytes"] == os.path.getsize(tmp_path / "r.rec")
    rows = read_by_mxnet(tmp_path / "r")
    assert [(key, header.id, header.label) for key, header, _ in rows] == [(i, i, i // 4) for i in range(8)]
    for (_, _, content), name in zip(rows, ["ant"] * 4 + ["bee"] * 4):
        assert cv2.imdecode(np.frombuffer(content, np.uint8), 1).shape[2] == 3
    if encoding == "as-is":
        assert rows[5][2] == (tmp_path / "f" / "bee" / "1.jpg").read_bytes()
    iterator = mx.io.ImageRecordIter(path_imgrec=str(tmp_path / "r.rec"), path_imgidx=str(tmp_path / "r.idx"),
                                     data_shape=(3, 32, 32), batch_size=4, preprocess_threads=1, verbose=False)
    assert [label for batch in iterator for label in batch.label[0].asnumpy()] == [0] * 4 + [1] * 4


def test_the_files_beside_it(tmp_path):
    make_records(RecordsConfig(data=make_folder(tmp_path / "f", ("b ü", "a")), out=str(tmp_path / "r")))
    assert (tmp_path / "r.classes.txt").read_text(encoding="utf-8") == "a\nb ü\n"
    assert (tmp_path / "r.lst").read_text(encoding="utf-8").splitlines()[3:5] == ["3\t0\ta/3.jpg", "4\t1\tb ü/0.png"]
    about = json.loads((tmp_path / "r.json").read_text())
    assert about["format"] == 1 and about["records"] == 8 and about["encoding"] == "as-is"
    assert not hidden(tmp_path)


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_workers_change_nothing(tmp_path, workers):
    folder = make_folder(tmp_path / "f", count=20)
    for out, count in (("a", 2), ("b", workers)):
        make_records(RecordsConfig(data=folder, out=str(tmp_path / out), encoding="jpeg", workers=count))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_resized_images_have_the_shorter_side_and_are_never_enlarged(tmp_path):
    folder = make_folder(tmp_path / "f", endings=("png",))
    for encoding in ("raw", "jpeg"):
        make_records(RecordsConfig(data=folder, out=str(tmp_path / encoding), encoding=encoding, resize=42))
        source = open_source(DataConfig(data=str(tmp_path / encoding), val_split=0))
        # Stored are 40x50, 41x49, 42x48 and 43x47.
        assert [source.train[0, i][0].shape[:2] for i in range(4)] == [(40, 50), (41, 49), (42, 48), (42, 46)]
    pixels = images.load(str(tmp_path / "f" / "ant" / "3.png"))
    raw = open_source(DataConfig(data=str(tmp_path / "raw"), val_split=0)).train
    assert np.array_equal(raw[0, 3][0], images.scale(pixels, 42, 46))
    assert np.array_equal(raw[0, 0][0], images.load(str(tmp_path / "f" / "ant" / "0.png")))


def test_quality_is_that_of_the_jpeg(tmp_path):
    folder = make_folder(tmp_path / "f")
    sizes = []
    for quality in (20, 60, 95):
        settings = RecordsConfig(data=folder, out=str(tmp_path / f"{quality}"), encoding="jpeg", quality=quality)
        sizes.append(make_records(settings)[0]["bytes"])
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] / 2


def test_a_folder_with_parts_becomes_two_files(tmp_path):
    make_folder(tmp_path / "f" / "train")
    make_folder(tmp_path / "f" / "val", ("bee",), count=1)
    files = make_records(RecordsConfig(data=str(tmp_path / "f"), out=str(tmp_path / "r")))
    assert [(os.path.basename(file["rec"]), file["records"]) for file in files] == [("train.rec", 8), ("val.rec", 1)]
    assert read_by_mxnet(tmp_path / "r" / "val")[0][1].label == 1  # of the training part's classes
    make_folder(tmp_path / "f" / "val2", ("wasp",))
    os.rename(tmp_path / "f" / "val2" / "wasp", tmp_path / "f" / "val" / "wasp")
    refused("'wasp' has no training images", data=str(tmp_path / "f"), out=str(tmp_path / "s"))


def test_lists(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "a.csv").write_text("file,label\nbee/1.jpg,z\nant/0.png,b\nbee/0.png,z\n")
    make_records(RecordsConfig(data=str(tmp_path / "a.csv"), out=str(tmp_path / "c")))
    assert (tmp_path / "c.lst").read_text() == "0\t0\tant/0.png\n1\t1\tbee/0.png\n2\t1\tbee/1.jpg\n"
    assert (tmp_path / "c.classes.txt").read_text() == "b\nz\n"
    (tmp_path / "a.lst").write_text("5\t7\tbee/1.jpg\n9\t2\tant/0.png\n")
    make_records(RecordsConfig(data=str(tmp_path / "a.lst"), out=str(tmp_path / "l")))
    assert (tmp_path / "l.lst").read_text() == "0\t2\tant/0.png\n1\t7\tbee/1.jpg\n"  # the list's own numbers
    assert not (tmp_path / "l.classes.txt").exists()
    (tmp_path / "classes.txt").write_text("".join(f"n{i}\n" for i in range(8)))
    make_records(RecordsConfig(data=str(tmp_path / "a.lst"), out=str(tmp_path / "m")))
    assert open_source(DataConfig(data=str(tmp_path / "m"), val_split=0)).classes == ["n2", "n7"]


@pytest.mark.parametrize("encoding", ["as-is", "raw"])
def test_lists_and_their_records_are_split_alike(tmp_path, encoding):
    make_folder(tmp_path, count=20, endings=("png",))
    names = [f"{name}/{i}.png" for name in ("ant", "bee") for i in range(20)]
    (tmp_path / "a.csv").write_text("file,label\n" + "".join(f"{name},{name[:3]}\n" for name in reversed(names)))
    make_records(RecordsConfig(data=str(tmp_path / "a.csv"), out=str(tmp_path / "c"), encoding=encoding))
    one, two = (open_source(DataConfig(data=str(tmp_path / name))) for name in ("a.csv", "c.rec"))
    for part in ("train", "val"):
        ours, theirs = getattr(two, part), getattr(one, part)
        assert len(ours) == len(theirs) > 0
        assert all(np.array_equal(ours[0, i][0], theirs[0, i][0]) for i in range(len(ours)))


def test_magic_words_in_an_image_are_escaped(tmp_path):
    folder = make_folder(tmp_path / "f", endings=("png",))
    path = tmp_path / "f" / "ant" / "0.png"
    path.write_bytes(path.read_bytes() + b"\x0a\x23\xd7\xce" * 9)  # decoders do not look behind the end of a PNG
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert read_by_mxnet(tmp_path / "r")[0][2] == path.read_bytes()
    source = open_source(DataConfig(data=str(tmp_path / "r"), val_split=0))
    assert np.array_equal(source.train[0, 0][0], images.load(str(path)))


def test_bad_images_stop_or_are_skipped(tmp_path, caplog):
    folder = make_folder(tmp_path / "f")
    (tmp_path / "f" / "ant" / "1.jpg").write_bytes(b"no image")
    out = str(tmp_path / "r")
    refused(r"ant/1.jpg .*broken.*--on-bad-sample skip", data=folder, out=out)
    assert not (tmp_path / "r.rec").exists()
    (file,) = make_records(RecordsConfig(data=folder, out=out, on_bad_sample="skip"))
    refused("r.rec is there already", data=folder, out=out)  # it is not what a command that stops would have made
    assert (file["records"], file["skipped"]) == (7, 1) and "ant/1.jpg" in caplog.text
    assert [key for key, _, _ in read_by_mxnet(out)] == [0, 2, 3, 4, 5, 6, 7]
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "s"), on_bad_sample="skip"))
    assert contents(out) == contents(tmp_path / "s")  # going on after the stop gives the same as in one go
    assert len(open_source(DataConfig(data=out, val_split=0)).train) == 7
    for path in (tmp_path / "f").glob("*/*"):
        path.write_bytes(b"no image")
    refused("none of 8 images can be read", data=folder, out=str(tmp_path / "t"), on_bad_sample="skip")
    assert not (tmp_path / "t.rec").exists() and not (tmp_path / ".t.rec.plan").exists()


def test_what_is_there_is_not_replaced(tmp_path):
    folder = make_folder(tmp_path / "f")
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    before = contents(tmp_path / "r")
    refused("r.rec is there already; --overwrite", data=folder, out=str(tmp_path / "r"), encoding="raw")
    assert contents(tmp_path / "r") == before
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r.rec"), encoding="raw", overwrite=True))
    assert contents(tmp_path / "r") != before
    (tmp_path / "a.lst").write_text("0\t0\tf/ant/0.png\n1\t1\tf/bee/0.png\n")
    for overwrite in (False, True):
        refused("a.lst is the source", data=str(tmp_path / "a.lst"), out=str(tmp_path / "a"), overwrite=overwrite)


def test_places_where_nothing_can_be_written(tmp_path):
    folder = make_folder(tmp_path / "f")
    (tmp_path / "file").write_text("")
    refused("--out: .*file: cannot be written: File exists", data=folder, out=str(tmp_path / "file" / "r"))
    refused("--out: .*cannot be written: File name too long", data=folder, out=str(tmp_path / ("r" * 300)))


def test_settings_are_checked():
    for text, settings in (("--data is missing", {"out": "r"}), ("--out is missing", {"data": "f"}),
                           ("--resize 0", {"resize": 0, "encoding": "raw"}), ("--quality 101", {"quality": 101}),
                           ("--resize 9: images are not changed", {"resize": 9, "encoding": "as-is"}),
                           ("--quality 9: has no effect with --encoding raw", {"quality": 9, "encoding": "raw"}),
                           ("--quality 9: has no effect with --encoding as-is", {"quality": 9}),
                           ("--workers 0", {"workers": 0}), ("--encoding png", {"encoding": "png"}),
                           ("--on-bad-sample no", {"on_bad_sample": "no"})):
        with pytest.raises(UserError, match=text):
            RecordsConfig(**{**({"data": "f", "out": "r"} if "missing" not in text else {}), **settings})
    jpeg = RecordsConfig(data="f", out="r", resize=9)
    assert (jpeg.encoding, jpeg.quality) == ("jpeg", 95)


def test_flags_without_effect_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    make_records(RecordsConfig(data=make_folder(tmp_path / "f"), out=str(tmp_path / "r"), label_column="x"))
    assert "--label-column x has no effect: " in caplog.text
    (tmp_path / "a.lst").write_text("0\t0\tf/ant/0.png\n")
    make_records(RecordsConfig(data=str(tmp_path / "a.lst"), out=str(tmp_path / "s"), image_column="y"))
    assert "--image-column y has no effect: " in caplog.text


def test_records_do_not_go_where_they_would_be_taken_for_the_source(tmp_path):
    folder = make_folder(tmp_path / "f")
    refused("--out .*f/: is the source", data=folder, out=folder + "/")
    assert sorted(os.listdir(folder)) == ["ant", "bee"]


def test_sources_that_are_none(tmp_path):
    (tmp_path / "a.txt.gz").write_text("")
    refused("gone: does not exist", data=str(tmp_path / "gone"), out=str(tmp_path / "r"))
    refused("neither a folder nor a list", data=str(tmp_path / "a.txt.gz"), out=str(tmp_path / "r"))
    refused("no images in class folders", data=str(tmp_path), out=str(tmp_path / "r"))
    folder = make_folder(tmp_path / "f")
    os.rename(tmp_path / "f/ant/0.png", tmp_path / "f/ant/0\n.png")
    refused("holds a line break", data=folder, out=str(tmp_path / "r"))


# A run that was ended in the middle


def interrupt(monkeypatch, after):
    """Makes the encoding of image number `after` fail like a full disk or a signal would."""
    encode, calls = program.encode, []

    def failing(path, settings):
        calls.append(path)
        if len(calls) > after:
            raise KeyboardInterrupt
        return encode(path, settings)

    monkeypatch.setattr(program, "encode", failing)


@pytest.mark.parametrize("after", [0, 1, 13, 39])
@pytest.mark.parametrize("tail", [b"", b"\x0a\x23\xd7\xce", bytes(5000), b"\x0a\x23\xd7\xce\xff\xff\x00\x00abc"])
def test_a_run_goes_on_where_it_ended(tmp_path, monkeypatch, after, tail):
    folder = make_folder(tmp_path / "f", count=20)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "once"), encoding="jpeg"))
    settings = dict(data=folder, out=str(tmp_path / "r"), encoding="jpeg", workers=1)
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(**settings))
    partial = tmp_path / ".r.rec.part"
    left = partial.stat().st_size
    assert not (tmp_path / "r.rec").exists()
    with open(partial, "ab") as file:
        file.write(tail)
    done = []
    monkeypatch.setattr(program, "encode", lambda path, settings, encode=program.encode: done.append(path) or
                        encode(path, settings))
    make_records(RecordsConfig(**settings))
    assert contents(tmp_path / "r") == contents(tmp_path / "once") and not hidden(tmp_path)
    # What was written is not made again, but for the one record that is looked at.
    assert len(done) <= 40 - (left > 0) * max(0, after - 4) + 1


def test_damage_at_the_end_of_what_is_left_is_made_good(tmp_path, monkeypatch):
    """As after a power failure: the file has its length, and its last blocks were never written."""
    folder = make_folder(tmp_path / "f", count=20)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "once")))
    settings = dict(data=folder, out=str(tmp_path / "r"), workers=1)
    with monkeypatch.context() as patch:
        interrupt(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(**settings))
    partial = tmp_path / ".r.rec.part"
    content = partial.read_bytes()
    partial.write_bytes(content[:-3000] + bytes(2990) + content[-10:])
    make_records(RecordsConfig(**settings))
    assert contents(tmp_path / "r") == contents(tmp_path / "once")


def test_a_part_that_is_complete_is_not_made_again(tmp_path, monkeypatch):
    for part in ("train", "val"):
        make_folder(tmp_path / "f" / part, count=10)
    make_records(RecordsConfig(data=str(tmp_path / "f"), out=str(tmp_path / "once")))
    with monkeypatch.context() as patch:
        interrupt(patch, 25)  # in the second part
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(data=str(tmp_path / "f"), out=str(tmp_path / "r"), workers=1))
    assert (tmp_path / "r" / "train.rec").exists() and not (tmp_path / "r" / "val.rec").exists()
    before = os.stat(tmp_path / "r" / "train.rec").st_ino
    files = make_records(RecordsConfig(data=str(tmp_path / "f"), out=str(tmp_path / "r")))
    assert [file["records"] for file in files] == [20, 20] and os.stat(tmp_path / "r" / "train.rec").st_ino == before
    for part in ("train", "val"):
        assert contents(tmp_path / "r" / part) == contents(tmp_path / "once" / part)


def test_another_command_does_not_go_on(tmp_path, monkeypatch, caplog):
    folder = make_folder(tmp_path / "f", count=20)
    with monkeypatch.context() as patch:
        interrupt(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(data=folder, out=str(tmp_path / "r"), workers=1))
    caplog.set_level("INFO", "mxtrain")
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r"), encoding="raw"))
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "once"), encoding="raw"))
    assert contents(tmp_path / "r") == contents(tmp_path / "once") and "goes on" not in caplog.text


def test_a_run_that_ended_before_its_last_rename_goes_on(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "f", count=20)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "once")))
    replace = os.replace

    def ending(source, target):
        if target.endswith(".rec"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ending)
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert (tmp_path / "r.json").exists() and not (tmp_path / "r.rec").exists()
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert contents(tmp_path / "r") == contents(tmp_path / "once") and not hidden(tmp_path)


def test_what_was_skipped_is_not_skipped_for_one_who_wants_to_stop(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "f", count=20)
    (tmp_path / "f" / "ant" / "10.png").write_bytes(b"no image")  # the third of its class by name
    with monkeypatch.context() as patch:
        interrupt(patch, 30)
        with pytest.raises(KeyboardInterrupt):
            make_records(RecordsConfig(data=folder, out=str(tmp_path / "r"), workers=1, on_bad_sample="skip"))
    assert (tmp_path / ".r.rec.part").stat().st_size
    refused("ant/10.png .*broken", data=folder, out=str(tmp_path / "r"))


def test_a_full_disk_is_one_line_and_can_be_gone_on_from(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "f", count=20)
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "once")))
    real = os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TrainingError, match="r.rec: cannot be written: No space left on device; the same command"):
            make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert os.fsync is real and not (tmp_path / "r.rec").exists()
    make_records(RecordsConfig(data=folder, out=str(tmp_path / "r")))
    assert contents(tmp_path / "r") == contents(tmp_path / "once")


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "make_records.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_killed_process_and_the_next(tmp_path):
    folder = tmp_path / "f"
    make_folder(folder, count=2, endings=("png",))
    large = cv2.imencode(".png", np.random.RandomState(0).randint(0, 256, (700, 700, 3)).astype("uint8"))[1].tobytes()
    for i in range(60):
        (folder / "ant" / f"large{i}.png").write_bytes(large)
    make_records(RecordsConfig(data=str(folder), out=str(tmp_path / "once"), encoding="raw"))
    process = start("--data", folder, "--out", tmp_path / "r", "--encoding", "raw", "--workers", "1")
    partial, deadline = tmp_path / ".r.rec.part", time.time() + 60
    while not (partial.exists() and partial.stat().st_size > 5e6) and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not (tmp_path / "r.rec").exists()
    process = start("--data", folder, "--out", tmp_path / "r", "--encoding", "raw", "--json")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out)["files"][0]["records"] == 64 and "goes on after" in errors
    assert contents(tmp_path / "r") == contents(tmp_path / "once")
    process = start("--data", folder, "--out", tmp_path / "r")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and errors.count("\n") == 1 and "--overwrite" in errors
    process = start("--data", folder, "--out", tmp_path / "r", "--encoding", "raw")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "r.rec: is complete already" in errors


def test_the_program_in_process(tmp_path, capsys):
    folder = make_folder(tmp_path / "f")
    assert main(["--data", folder, "--out", str(tmp_path / "r")]) == 0
    assert "8 images" in capsys.readouterr().out
    assert main(["--data", folder, "--out", str(tmp_path / "r"), "--overwrite", "--json", "--resize", "10"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["records"] == 8
    with pytest.raises(UserError, match="no-such"):
        main(["--no-such"])


def test_two_at_once_are_refused(tmp_path):
    folder = make_folder(tmp_path / "f")
    with open(tmp_path / ".r.rec.part", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused("another make_records.py is writing it", data=folder, out=str(tmp_path / "r"))


def test_help_needs_no_mxnet():
    code = ("import sys\nfrom mxtrain.data.make_records import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
            "slow = {'mxnet', 'cv2', 'sklearn', 'gluoncv', 'matplotlib'} & set(sys.modules)\nassert not slow, slow")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--on-bad-sample {stop,skip}" in done.stdout
