"""metrics.csv."""

from types import SimpleNamespace

from mxtrain.callbacks.table import COLUMNS, Table, read


def rows(epoch, **more):
    return [{**dict.fromkeys(COLUMNS, 1), "epoch": epoch, "update": 10 * epoch, "split": split, "loss": 1 / 3, **more}
            for split in ("train", "val")]


def at(epoch, update=0):
    return SimpleNamespace(epoch=epoch, update=update)


def epochs(path):
    return [(int(row["epoch"]), row["split"]) for row in read(path)]


def test_one_row_per_epoch_and_split_with_the_columns_of_the_design(tmp_path):
    path = tmp_path / "metrics.csv"
    table = Table(path)
    table.start(at(0))
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    for epoch in (1, 2):
        table.epoch(rows(epoch))
    assert epochs(path) == [(1, "train"), (1, "val"), (2, "train"), (2, "val")]
    assert path.read_text().splitlines()[0] == (
        "epoch,update,split,samples,loss,accuracy,lr,seconds,samples_per_second,wait_share")
    assert float(read(path)[0]["loss"]) == 1 / 3  # all digits


def test_other_columns_come_after_those_and_may_be_missing_in_a_row(tmp_path):
    path = tmp_path / "metrics.csv"
    table = Table(path)
    table.start(at(0))
    table.epoch(rows(1))
    train, val = rows(2)
    table.epoch([{**train, "grad_norm": 2.5}, {**val, "top5": 0.75, "accuracy": None}])
    header = path.read_text().splitlines()[0].split(",")
    assert header == [*COLUMNS, "grad_norm", "top5"]
    found = read(path)
    assert [row["grad_norm"] for row in found] == ["", "", "2.5", ""]
    assert found[3]["top5"] == "0.75" and found[3]["accuracy"] == ""


def test_is_cut_back_to_the_epochs_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    table = Table(path)
    table.start(at(0))
    for epoch in (1, 2, 3):
        table.epoch(rows(epoch, top5=epoch))
    again = Table(path)
    again.start(at(1, 14))  # within the second epoch
    assert epochs(path) == [(1, "train"), (1, "val")]
    again.epoch(rows(2, top5=7))
    assert [row["top5"] for row in read(path)] == ["1", "1", "7", "7"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resume_whose_table_is_lost_goes_on_with_a_new_one(tmp_path):
    table = Table(tmp_path / "metrics.csv")
    table.start(at(2))
    table.epoch(rows(3))
    assert epochs(tmp_path / "metrics.csv") == [(3, "train"), (3, "val")]


def test_no_file_has_no_rows(tmp_path):
    assert read(tmp_path / "none.csv") == []
