import os
import unicodedata

import mxtrain  # noqa: F401
import pytest
from mxtrain.data import folder
from mxtrain.errors import UserError


def make(root, *names, content=b"pixels"):
    """Files below root; a name with a slash at its end is a folder. A scan does not look into them."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return str(root)


def names_of(part):
    return {name: [image.name for image in members] for name, members in part.images.items()}


def test_hidden_and_foreign_entries_are_skipped_and_counted(tmp_path):
    root = make(
        tmp_path,
        *("cat/a.jpg", "cat/B.JPEG", "dog/c.png", "dog/deep/d.webp"),
        *(".DS_Store", ".ipynb_checkpoints/a-checkpoint.jpg", "cat/._a.jpg", "dog/.hidden/x.jpg"),  # 4 hidden
        *("__MACOSX/cat/a.jpg",),
        *("Thumbs.db", "cat/notes.txt", "cat/a.jpg~", "dog/desktop.ini"),  # 4 not images
        *("stray.jpg",),
    )
    make(tmp_path, "cat/empty.jpg", content=b"")
    os.symlink(tmp_path / "cat" / "a.jpg", tmp_path / "dog" / "link.jpg")
    os.symlink(tmp_path / "gone.jpg", tmp_path / "dog" / "broken.jpg")
    os.symlink(tmp_path, tmp_path / "dog" / "loop")
    part = folder.scan(root)
    assert names_of(part) == {"cat": ["B.JPEG", "a.jpg"], "dog": ["c.png", "deep/d.webp", "link.jpg"]}
    assert dict(part.skipped) == {
        "hidden": 4,
        "left by the system": 1,
        "not images": 4,
        "outside the class folders": 1,
        "empty files": 1,
        "broken links": 1,
        "links to a folder above": 1,
    }
    skipped, nested = part.notes()
    assert "skipped 13 entries" in skipped and "1 broken links" in skipped
    assert "1 images lie deeper" in nested


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_skipped_and_counted(tmp_path):
    root = make(tmp_path, "cat/a.jpg", "cat/b.jpg")
    os.chmod(tmp_path / "cat" / "b.jpg", 0)
    part = folder.scan(root)
    assert names_of(part) == {"cat": ["a.jpg"]} and part.skipped == {"unreadable": 1}


def test_class_names_survive(tmp_path):
    names = ["-dash", "#hash", "a b", "Ünïcode", "漢字", "with.dot"]
    root = make(tmp_path, *(f"{name}/x.jpg" for name in names))
    assert list(folder.scan(root).images) == sorted(names)


def test_accents_have_one_spelling(tmp_path):
    make(tmp_path / "train", unicodedata.normalize("NFD", "é") + "/x.jpg", "o/x.jpg")
    make(tmp_path / "val", unicodedata.normalize("NFC", "é") + "/x.jpg")
    classes = list(folder.scan(str(tmp_path / "train")).images)
    notes = folder.check_val_classes(folder.scan(str(tmp_path / "val")), classes)
    assert unicodedata.normalize("NFC", "é") in classes and "'o'" in notes[0]


def test_names_that_no_list_can_hold_are_refused(tmp_path):
    with pytest.raises(UserError, match="control character"):
        folder.scan(make(tmp_path, "a\nb/x.jpg"))


def test_folders_without_images_are_no_classes(tmp_path):
    part = folder.scan(make(tmp_path, "a/x.jpg", "b/", "c/readme.txt"))
    assert list(part.images) == ["a"] and part.empty == ["b", "c"]
    assert "no images in 'b', 'c'" in part.notes()[1]


@pytest.mark.parametrize(
    "files, text", [(["a.jpg", "b.jpg"], "2 images lie in it directly"), (["a/"], "CLASS/IMAGE")]
)
def test_a_folder_without_classes_says_what_was_looked_for(tmp_path, files, text):
    with pytest.raises(UserError, match=text):
        folder.scan(make(tmp_path, *files))


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test", "Val"])
def test_parts_are_found(tmp_path, name):
    root = make(tmp_path, "train/a/x.jpg", f"{name}/a/x.jpg")
    assert folder.parts(root) == (f"{root}/train", f"{root}/{name}", [])


def test_validation_comes_before_test_and_the_rest_is_said(tmp_path):
    root = make(tmp_path, "train/a/x.jpg", "test/a/x.jpg", "val/a/x.jpg", "extra/a/x.jpg")
    train, val, notes = folder.parts(root)
    assert val == f"{root}/val" and "'extra', 'test'" in notes[0]


def test_a_class_may_be_called_train(tmp_path):
    root = make(tmp_path, "train/x.jpg", "car/x.jpg", "plane/x.jpg")
    assert folder.parts(root) == (root, None, [])
    assert list(folder.scan(root).images) == ["car", "plane", "train"]


def test_a_validation_part_alone_is_refused(tmp_path):
    with pytest.raises(UserError, match="'val' but no train"):
        folder.parts(make(tmp_path, "val/a/x.jpg", "val/b/x.jpg"))


def test_a_class_without_training_images_is_refused_by_name(tmp_path):
    part = folder.scan(make(tmp_path, "a/x.jpg", "b/x.jpg", "zebra/x.jpg"))
    with pytest.raises(UserError, match="'zebra'"):
        folder.check_val_classes(part, ["a", "b"])


def test_orders_and_spellings_that_mislead_are_said():
    assert "label 1 is class '10'" in folder.class_notes(["1", "10", "2"])[0]
    assert "'Cat', 'cat'" in folder.class_notes(["Cat", "bird", "cat"])[0]
    assert folder.class_notes(["0", "1", "2"]) == folder.class_notes(["a", "b"]) == []


def images(*counts, prefix="f"):
    return {
        f"class{number}": [folder.Image(f"/x/{i}", f"{prefix}{i}.jpg", 1) for i in range(count)]
        for number, count in enumerate(counts)
    }


def test_a_split_is_stratified_and_about_the_share():
    train, val = folder.split(images(2000, 2000), 0.1)
    for name in train:
        assert len(train[name]) + len(val[name]) == 2000 and not set(train[name]) & set(val[name])
        assert 133 < len(val[name]) < 267  # five standard deviations of a binomial around 200


def test_a_split_does_not_pick_the_same_numbers_in_each_class():
    _, val = folder.split(images(2000, 2000), 0.1)
    first, second = ({image.name for image in members} for members in val.values())
    assert len(first & second) < 60  # 20 expected for independent choices, 200 for equal ones


def test_files_that_are_added_move_no_other():
    _, before = folder.split(images(300), 0.2)
    _, after = folder.split(images(400), 0.2)
    assert set(before["class0"]) == {image for image in after["class0"] if int(image.name[1:-4]) < 300}


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_small_classes_are_in_both_parts(count, fraction):
    train, val = folder.split(images(count, count), fraction)
    for name in ("class0", "class1"):
        assert train[name] and val[name] and len(train[name]) + len(val[name]) == count


def test_a_single_image_is_for_training():
    for fraction in (0, 0.01, 0.99):
        train, val = folder.split(images(1), fraction)
        assert len(train["class0"]) == 1 and val == {}


def test_no_share_holds_out_nothing():
    assert folder.split(images(50), 0)[1] == {}
