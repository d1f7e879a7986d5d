"""evaluate.py on other kinds of data than the run's: the same images give the same, in whatever form they lie."""

import mxnet as mx
import pytest

from mxtrain.data.make_records import RecordsConfig, make_records
from mxtrain.errors import UserError
from mxtrain.inference.evaluate import evaluate, main
from mxtrain.inference.load import load
from mxtrain.inference.samples import open_samples, same_place
from mxtrain.inference.settings import BatchConfig, RunConfig


def result(run, path, **columns):
    trained = load(RunConfig(run=str(run)), [mx.cpu()])
    return evaluate(trained, open_samples(str(path), trained, **columns), [mx.cpu()], BatchConfig())


def same(one, other):
    return one.samples == other.samples and one.means == other.means and (one.confusion == other.confusion).all()


@pytest.mark.parametrize("part", ["val", "train"])
def test_records_and_lists_of_a_folder(folder_run, images, tmp_path, part):
    expected = result(folder_run, images / part)
    make_records(RecordsConfig(data=str(images / part), out=str(tmp_path / "r")))
    assert same(result(folder_run, tmp_path / "r.rec"), expected)
    files = [(path.relative_to(images), path.parent.name) for path in sorted(images.glob(f"{part}/*/*"))]
    (tmp_path / "a.csv").write_text("where,what\n" + "".join(f"{path},{name}\n" for path, name in files))
    columns = {"data_root": str(images), "image_column": "where", "label_column": "what"}
    assert same(result(folder_run, tmp_path / "a.csv", **columns), expected)
    # The names of a .lst's numbers are matched to the network's, not the numbers.
    names = ["2", "10", "1"]
    rows = [f"{i}\t{names.index(name)}\t{path}\n" for i, (path, name) in enumerate(files)]
    (images / "a.lst").write_text("".join(rows))
    (images / "a.classes.txt").write_text("".join(f"{name}\n" for name in names))
    assert same(result(folder_run, images / "a.lst"), expected)
    for path in (images / "a.lst", images / "a.classes.txt"):
        path.unlink()


def test_a_record_folder_is_evaluated_by_its_validation_part(folder_run, images, tmp_path):
    make_records(RecordsConfig(data=str(images), out=str(tmp_path / "r")))
    assert same(result(folder_run, tmp_path / "r"), result(folder_run, images))


def test_the_runs_own_records_are_known_by_both_of_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.rec").write_bytes(b"")
    (tmp_path / "f").mkdir()
    (tmp_path / "f.rec").write_bytes(b"")
    assert same_place("r", "r.rec") and same_place("r.idx", str(tmp_path / "r"))
    assert not same_place("f", "f.rec") and not same_place("r", "f.rec")


def test_flags_of_lists_are_told_for_a_folder(folder_run, images, caplog):
    caplog.set_level("INFO")
    result(folder_run, images / "val", data_root="/x", image_column=None, label_column=None)
    assert "--data-root /x has no effect" in caplog.text and "--image-column" not in caplog.text


def test_one_class_alone_can_be_evaluated_and_an_unknown_one_not(folder_run, images, tmp_path):
    (tmp_path / "a.csv").write_text(f"path,label\n{images}/val/10/0.png,10\n")
    assert result(folder_run, tmp_path / "a.csv").samples == 1
    (tmp_path / "a.csv").write_text(f"path,label\n{images}/val/10/0.png,11\n")
    with pytest.raises(UserError, match="does not know the class '11'"):
        result(folder_run, tmp_path / "a.csv")


def test_the_flags_of_a_list(folder_run, images, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("where,what\n10/0.png,10\n2/1.png,2\n")
    flags = ["--data-root", str(images / "val"), "--image-column", "where", "--label-column", "what"]
    assert main(["--run", str(folder_run), "--data", str(tmp_path / "a.csv"), *flags]) == 0
    assert capsys.readouterr().out.startswith("2 samples")
    with pytest.raises(UserError, match="--image-column: the run's own data"):
        main(["--run", str(folder_run), "--image-column", "where"])
