"""Lists of images: .lst and tables of paths and labels."""

import os

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data.loader import Loader
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data, open_source
from mxtrain.errors import UserError


@pytest.fixture
def root(tmp_path):
    """images/0.png to images/9.png, each of its own grey."""
    (tmp_path / "images").mkdir()
    for i in range(10):
        cv2.imwrite(str(tmp_path / "images" / f"{i}.png"), np.full((8, 8, 3), 20 * i, "uint8"))
    return tmp_path


def write(path, *lines, newline="\n"):
    path.write_bytes("".join(line + newline for line in lines).encode())
    return str(path)


def config(path, **settings):
    return DataConfig(data=str(path), image_size=8, augment="none", **settings)


def samples(dataset):
    """[(grey of the image // 20, label)] in order."""
    return [(int(x[0, 0, 0]) // 20, int(y)) for x, y in (dataset[0, i] for i in range(len(dataset)))]


def refused(path, text, **settings):
    with pytest.raises(UserError, match=text) as error:
        open_data(config(path, **settings))
    assert "\n" not in str(error.value)


def test_a_lst_has_class_numbers(root):
    rows = ["7\t10\timages/3.png", "8\t2.000000\timages/1.png", "9\t2\timages/0.png", "", "1\t10\timages/2.png"]
    path = write(root / "a.lst", *rows)
    data = open_data(config(path, val_split=0))
    assert data.name == "list" and data.classes == ["2", "10"]  # by number: not sorted as text
    assert samples(data.train) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert data.train.dataset.describe(3).endswith("images/3.png")


def test_names_of_the_numbers(root):
    lines = ["0\t0\timages/0.png", "1\t2\timages/1.png", "2\t2\timages/2.png", "3\t0\timages/3.png"]
    path = write(root / "a.lst", *lines)
    write(root / "classes.txt", "ant", "bee", "cat")
    assert open_source(config(path)).classes == ["ant", "cat"]
    write(root / "a.classes.txt", "x", "y", "z")  # the file's own come first
    assert open_source(config(path)).classes == ["x", "z"]
    write(root / "a.classes.txt", "x", "y")
    refused(path, "a.lst: label 2 has no name: the list of classes has 2, for 0 to 1")
    write(root / "a.classes.txt", "x", "y", "x")
    refused(path, "a.classes.txt, line 3: class 'x' is there twice")


@pytest.mark.parametrize("line, text", [
    ("0 0 images/0.png", "line 2: has 1 fields between tabs"),
    ("0\t0\timages/\0.png", "line 2: holds a NUL character"),
    ("0\t0", "line 2: has 2 fields"),
    ("0\t0\t1\timages/0.png", "line 2: has 2 labels; one label"),
    ("0\t1.5\timages/0.png", "line 2: label '1.5'; the labels of a .lst must be whole"),
    ("0\t-1\timages/0.png", "line 2: label '-1'"),
    ("0\tant\timages/0.png", "line 2: label 'ant'"),
    ("0\tnan\timages/0.png", "line 2: label 'nan'"),
    ("0\t0\timages/gone.png", "line 2: .*images/gone.png: No such file or directory; --data-root"),
    ("0\t0\timages", "line 2: .*images: Is a directory; --data-root"),
    ("0\t0\timages/1.png", "line 2: images/1.png has the label '0' here and '1' in line 1"),
    ("0\t0\t./images//1.png", "line 2: ./images//1.png has the label"),
])
def test_lines_that_cannot_be_are_named(root, line, text):
    refused(write(root / "a.lst", "0\t1\timages/1.png", line), f"a.lst, {text}")


def test_a_list_without_images_or_with_one_class(root):
    refused(write(root / "a.lst", ""), "a.lst: lists no images")
    refused(write(root / "a.lst", "0\t3\timages/0.png", "1\t3\timages/1.png"), "only one class, '3'")
    refused(write(root / "a.lst", "0\t3\timages/0.png", "1\t4\timages/1.png"), "--val-split 0 to train without")


def test_all_missing_files_are_counted(root):
    path = write(root / "a.csv", "file,label", "images/0.png,a", "x.png,a", "y.png,b")
    refused(path, r"a.csv, line 3: .*x.png: No such file or directory \(2 of 3 rows\); --data-root says where")


@pytest.mark.parametrize(
    "header", ["path,label", "Label , File", "label;image_path", "filename\tclass", "id,image,category"]
)
def test_columns_are_found_by_their_names(root, header):
    mark = next(mark for mark in "\t;," if mark in header)
    names = [name.strip().lower() for name in header.split(mark)]
    rows = [mark.join({"label": label, "class": label, "category": label, "id": "7"}.get(name, f"images/{i}.png")
                      for name in names) for i, label in enumerate("abab")]
    data = open_data(config(write(root / "a.csv", header, *rows, newline="\r\n"), val_split=0))
    assert data.classes == ["a", "b"] and samples(data.train) == [(0, 0), (2, 0), (1, 1), (3, 1)]


def test_columns_are_named_by_flags(root):
    path = write(root / "a.tsv", "what\twhere\tpath", "b\timages/4.png\tx", "a\timages/5.png\tx")
    data = open_data(config(path, val_split=0, image_column="where", label_column="what"))
    assert samples(data.train) == [(5, 0), (4, 1)]
    refused(path, "no column named label", image_column="where")
    refused(path, "--image-column when: .*no such column", image_column="when", label_column="what")


def test_the_labels_of_a_table_are_names_sorted_as_text(root):
    path = write(root / "a.csv", "path,label", "images/0.png,10", "images/1.png,2", 'images/2.png,"1, or so"')
    data = open_data(config(path, val_split=0))
    assert data.classes == ["1, or so", "10", "2"] and samples(data.train) == [(2, 0), (0, 1), (1, 2)]
    path = write(root / "b.csv", "path,label", "images/0.png,10", "images/1.png,2")
    assert any("sorted as text, not as numbers" in note for note in open_data(config(path, val_split=0)).notes)


def test_cells_that_are_empty_are_named(root):
    path = write(root / "a.csv", "path,label", "images/0.png,a", "images/1.png, ")
    refused(path, "a.csv, line 3: no label in the column 'label'")
    refused(write(root / "a.csv", "path,label", ",a"), "a.csv, line 2: no path in the column 'path'")


def test_the_order_of_the_rows_plays_no_part(root):
    rows = [f"images/{i}.png,{'ab'[i % 2]}" for i in range(10)]
    one = open_data(config(write(root / "a.csv", "path,label", *rows)))
    two = open_data(config(write(root / "b.csv", "path,label", *reversed(rows))))
    assert one.fingerprint == two.fingerprint and samples(one.train) == samples(two.train)
    other = open_data(config(write(root / "c.csv", "path,label", *rows[:-1], "images/9.png,a")))
    assert other.fingerprint != one.fingerprint


def test_paths_start_from_the_root(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("lists")
    absolute = str(root / "images" / "1.png")
    path = write(elsewhere / "a.csv", "path,label", "0.png,a", f"{absolute},b")
    data = open_data(config(path, val_split=0, data_root=str(root / "images")))
    assert samples(data.train) == [(0, 0), (1, 1)]
    refused(path, "line 2: .*0.png: No such file")
    folder = open_data(DataConfig(data="digits", data_root="x", image_column="y"))
    assert [note for note in folder.notes if "no effect" in note] == [
        "--data-root x has no effect: digits is the built-in digits",
        "--image-column y has no effect: digits is the built-in digits",
    ]


def test_the_place_plays_no_part_also_in_whole_paths(root):
    found = []
    for start in ("", f"{root}/"):
        path = write(root / "a.csv", "path,label", *(f"{start}images/{i}.png,{'ab'[i % 2]}" for i in range(10)))
        data = open_data(config(path, val_split=0.3))
        found.append((data.fingerprint, samples(data.val)))
    assert found[0] == found[1]
    refused(write(root / "a.csv", "path,label", "images/0.png,a", f"{root}/images/0.png,b"), "line 3: .* has the label")


def test_columns_have_no_effect_on_a_lst(root):
    def idle(data, **settings):
        notes = open_data(config(data, image_column="path", label_column="label", **settings)).notes
        return [note.split(" has no effect")[0] for note in notes if "no effect" in note]

    lst = write(root / "a.lst", "0\t0\timages/0.png", "1\t1\timages/1.png")
    assert idle(lst, val_split=0) == ["--image-column path", "--label-column label"]
    table = write(root / "a.csv", "path,label", "images/2.png,0", "images/3.png,1")
    assert idle(table, val_split=0) == idle(lst, val=table) == []


def test_an_image_that_is_listed_again_counts_again_and_is_never_in_both_parts(root):
    rows = [f"images/{i}.png,{'ab'[i % 2]}" for i in range(10)]
    data = open_data(config(write(root / "a.csv", "path,label", *rows, *rows, "./images/0.png,a"), val_split=0.3))
    assert any("a.csv: 11 rows name an image again; each counts" in note for note in data.notes)
    assert len(data.train) + len(data.val) == 21
    assert not set(samples(data.train)) & set(samples(data.val))


def test_validation_by_another_list(root):
    train = write(root / "a.csv", "path,label", *(f"images/{i}.png,{'abc'[i % 3]}" for i in range(6)))
    val = write(root / "b.csv", "file,class", "images/7.png,c", "images/6.png,a")
    data = open_data(config(train, val=val))
    assert samples(data.val) == [(6, 0), (7, 2)] and len(data.train) == 6
    assert any("b.csv: no validation images of class 'b'" in note for note in data.notes)
    refused(train, "b.csv: class 'd' has no training images; the classes are 'a', 'b', 'c'",
            val=write(root / "b.csv", "file,class", "images/7.png,d"))
    data = open_data(config(train, val=write(root / "b.csv", "file,class", "images/0.png,a", "images/7.png,b")))
    assert any("b.csv: 1 of its images are training images too" in note for note in data.notes)
    refused(train, "--val .*is a folder of images, but --data .* is a list", val=str(root / "images"))
    np.savez(root / "a.npz", x=np.zeros((2, 4, 4), np.uint8), y=np.arange(2))
    refused(train, "--val .*is numpy arrays, but --data .* is a list", val=str(root / "a.npz"))
    # A .lst without names of its own has those of the training list.
    write(root / "t.classes.txt", "x", "y")
    lst = write(root / "t.lst", "0\t0\timages/0.png", "1\t1\timages/1.png")
    assert samples(open_data(config(lst, val=write(root / "v.lst", "0\t1\timages/2.png"))).val) == [(2, 1)]


def test_lists_give_the_same_batches_with_workers(root):
    path = write(root / "a.csv", "path,label", *(f"images/{i}.png,{'ab'[i % 2]}" for i in range(10)))
    data = open_data(config(path, val_split=0), seed=1)
    batches = []
    for workers in (0, 2):
        loader = Loader(data.train, 4, seed=1, workers=workers)
        batches.append([(x.tobytes(), y.tolist()) for x, y in loader.batches(2)])
        loader.close()
    assert batches[0] == batches[1] and sum(len(y) for _, y in batches[0]) == 10


def test_names_of_files_and_classes_survive(root):
    name = "images/é # -日本.png"
    os.rename(root / "images" / "0.png", root / name)
    path = write(root / "a.csv", "path,label", f"{name},-ß 日本", "images/1.png,ant")
    data = open_data(config(path, val_split=0))
    assert data.classes == ["-ß 日本", "ant"] and len(samples(data.train)) == 2
    refused(write(root / "a.csv", "path,label", "images/1.png,a\x07"), "line 2: label .*control character")
