"""What is learned: worked out from a table's columns, or refused with the flags that say it."""

import pytest

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.tasks.kind import resolve


@pytest.fixture
def table(tmp_path):
    def write(header, name="data.csv"):
        (tmp_path / name).write_text(f"{header}\na,b,c\n")
        return str(tmp_path / name)

    return write


def of(path, **given):
    return resolve(config.build({"data": path, **given}))


def test_it_is_worked_out(table, tmp_path):
    assert of("digits") == of(str(tmp_path)) == of(str(tmp_path / "none.csv")) == "image"
    assert of(table("label,text,id")) == of(table("MESSAGE;Label", "mails.txt")) == "text"
    assert of(table("path,label")) == "image"


def test_a_text_file_that_is_no_table_is_language(table, tmp_path):
    prose = tmp_path / "book.txt"
    for start in ("Call me Ishmael.\nSome years ago, never mind how long,\n", "One, two\n\nthree, four, five\nsix\n",
                  "a line without an end", "text\nthat begins so\n", "to be, or not\n"):
        prose.write_text(start)
        assert of(str(prose)) == "lm", start
    assert of(str(prose), task="lm") == of(str(tmp_path / "gone.md"), task="lm") == "lm"
    prose.write_text("v1,v2\nham,hello\nspam,win\n")  # a table, only of other columns
    with pytest.raises(UserError, match="neither texts nor images.*--task says which"):
        of(str(prose))
    assert of(str(prose), task="lm") == "lm"
    with pytest.raises(UserError, match="is empty"):
        prose.write_text("")
        of(str(prose))


def test_flags_say_it(table):
    assert of(table("v1,v2"), text_column="v2") == of(table("v1,v2"), task="text") == "text"
    assert of(table("v1,v2"), image_column="v2") == of(table("v1,v2"), task="image") == "image"


@pytest.mark.parametrize("header, says", [("v1,v2", "neither texts nor images"),
                                          ("text,image", "both texts and images")])
def test_what_is_not_clear_is_refused_with_columns_and_flags(table, header, says):
    with pytest.raises(UserError) as error:
        of(table(header))
    for part in (says, "--task", "--text-column", "--label-column", *map(repr, header.split(","))):
        assert part in str(error.value)


@pytest.mark.parametrize("given", [
    {"data": "digits", "ngrams": 1}, {"data": "digits", "positive": "1"}, {"data": "digits", "text_column": "x"},
    {"task": "text", "augment": "crop"}, {"task": "text", "image_size": 8}, {"task": "text", "color_jitter": 0.1},
    {"task": "text", "image_column": "x"}, {"task": "text", "pretrained": True}, {"task": "text", "zero_gamma": True},
    {"task": "text", "layers": 2}, {"data": "digits", "width": 64}, {"task": "lm", "augment": "crop"},
    {"task": "lm", "label_column": "x"}, {"task": "lm", "max_tokens": 9}, {"task": "lm", "label_smoothing": 0.1},
    {"task": "lm", "zero_gamma": True}, {"task": "lm", "model": "own:net", "dropout": 0.1},
])
def test_settings_of_the_other_task_are_refused(given):
    flag = "--" + list(given)[-1].replace("_", "-")
    with pytest.raises(UserError, match=flag):
        resolve(config.build(given))


def test_texts_without_a_table_are_not_looked_for_in_the_digits():
    with pytest.raises(UserError, match="--data is missing: --task text needs a table"):
        resolve(config.build({"task": "text"}))
    with pytest.raises(UserError, match="--data is missing: --task lm needs a text file"):
        resolve(config.build({"task": "lm"}))


def test_a_saved_run_keeps_its_task(tmp_path):
    saved = {"task": "text", "data": "gone.csv", "batch_size": 64}
    assert resolve(config.build(config.resume_values(saved, {"task": "auto"}))) == "text"
    with pytest.raises(UserError, match="--task image: the run was started with text"):
        config.resume_values(saved, {"task": "image"})
