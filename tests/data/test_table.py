"""Tables: the same rows however they were written, and one line for those that cannot be read for sure."""

import csv

import pytest

from mxtrain.data import table as module
from mxtrain.data.table import find_column, has_column, read_columns, read_table
from mxtrain.errors import UserError

ROWS = [["ham", "see you, at 5"], ["spam", "win; now"], ["ham", 'a "quoted" word'], ["ham", "é £ 你"]]


def write(folder, content, name="mails.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def as_csv(delimiter, end="\n"):
    lines = [["label", "text"], *ROWS]
    quoted = [delimiter.join(f'"{field}"'.replace('"quoted"', '""quoted""') for field in line) for line in lines]
    return end.join(quoted) + end


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_same_rows_in_every_dialect(tmp_path, delimiter, end, encoding):
    table = read_table(write(tmp_path, as_csv(delimiter, end).encode(encoding)))
    assert (table.columns, table.rows, table.lines, table.notes) == (["label", "text"], ROWS, [2, 3, 4, 5], [])


def test_python_s_own_writer_is_read_back(tmp_path):
    for delimiter in ",;\t":
        with open(tmp_path / "x.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter).writerows([["label", "text"], *ROWS])
        assert read_table(str(tmp_path / "x.csv")).rows == ROWS


def test_quoted_fields_hold_line_ends_and_quotes(tmp_path):
    text = 'label,text\nham,"two\r\n\r\nparagraphs, ""so"" to say"\n\nspam,one'  # no line end at the end
    table = read_table(write(tmp_path, text))
    assert table.rows == [["ham", 'two\n\nparagraphs, "so" to say'], ["spam", "one"]]
    assert table.lines == [2, 6]


def test_mixed_line_ends_and_blank_lines(tmp_path):
    table = read_table(write(tmp_path, "label,text\r\n\nham,a\n  \nham,b\r\n\r\nspam,c\n\n\n"))
    assert table.rows == [["ham", "a"], ["ham", "b"], ["spam", "c"]] and table.lines == [3, 5, 7]


def test_one_column_may_hold_empty_fields(tmp_path):
    table = read_table(write(tmp_path, 'text\na\n""\n\nb\n'))
    assert (table.rows, table.lines) == ([["a"], [""], ["b"]], [2, 3, 5])


def test_another_encoding(tmp_path):
    path = write(tmp_path, "label,text\nham,it\u2019s \u20ac5\n".encode("cp1252"))
    assert read_table(path, encoding="cp1252").rows == [["ham", "it\u2019s \u20ac5"]]
    assert read_columns(path, "cp1252") == ["label", "text"]
    marked = write(tmp_path, "label,text\nham,\u20ac5\n".encode("utf-8-sig"))
    assert read_table(marked, encoding="cp1252").rows == [["ham", "\u20ac5"]]  # the mark knows better


def test_a_quote_between_tabs_is_text_unless_all_are_closed(tmp_path):
    literal = 'label\ttext\nham\t"Hello" she said\nham\t"closed"\nspam\t"open\n'
    assert [row[1] for row in read_table(write(tmp_path, literal)).rows] == ['"Hello" she said', '"closed"', '"open']
    quoting = 'label\ttext\nham\t"closed"\nham\tplain\n'
    assert [row[1] for row in read_table(write(tmp_path, quoting)).rows] == ["closed", "plain"]
    several = 'label\ttext\nham\t"two\nlines"\nham\tplain\n'
    assert [row[1] for row in read_table(write(tmp_path, several)).rows] == ["two\nlines", "plain"]


def test_two_stray_quotes_between_tabs_do_not_swallow_the_rows_between(tmp_path):
    stray = 'label\ttext\nham\t"open\nspam\tmiddle\nham\tclose"\n'  # which would be one well-formed quoted field
    assert [row[1] for row in read_table(write(tmp_path, stray)).rows] == ['"open', "middle", 'close"']


def test_trailing_columns_without_a_name(tmp_path):
    table = read_table(write(tmp_path, "v1,v2,,,\nham,a,,,\nham,b\nham,c,more,,\n,,,,\n"))
    assert table.columns == ["v1", "v2"] and table.rows == [["ham", "a"], ["ham", "b"], ["ham", "c"]]
    assert ["line 4" in note for note in table.notes] == [True, False] and "1 rows without any text" in table.notes[1]
    assert read_table(write(tmp_path, ",label,text\n0,ham,a\n")).columns == ["", "label", "text"]


def test_fields_longer_than_csv_allows_by_default(tmp_path):
    limit = csv.field_size_limit()
    long = "x" * (limit + 1)
    assert read_table(write(tmp_path, f'label,text\nham,"{long}"\n')).rows == [["ham", long]]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("content, says", [
    (b"label,text\nham,a\nham,b, c\n", "line 3: 3 fields"),
    (b"label,text\nham,a\n\nham\n", "line 4: 1 field "),
    (b'label,text\nham,a\nspam,"open\nham,b\nham,c\n', "line 3: a quote is not closed"),
    (b'label,text\nham,"a"\nspam,"open\nham,"b"\n', "line 3: a quote is not closed"),
    (b'label,text\nham,"a" b\n', "line 2: a quote is not closed, or text follows"),
    (b'label\ttext\nham\t"two\nlines"\nham\t"open\n', "line 3: 1 field"),
    (b"label,text\nham,a\nham,b\0\n", "line 3: holds a NUL"),
    (b"label,text\r\nham,a\r\nham,\x92b\r\n", "line 3: byte 0x92 is not UTF-8"),
    ("label,text\nham,a".encode("utf-16-le"), "line 1: holds a NUL"),
    (b"", "is empty"), (b"\n \n", "is empty"), (b"label,text\n\n,,\n", "no rows below"),
])
def test_what_cannot_be_read_is_one_line_with_the_place(tmp_path, content, says):
    with pytest.raises(UserError) as error:
        read_table(write(tmp_path, content))
    assert "mails.csv" in str(error.value) and says in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_table(str(path))


def test_the_first_line_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_HEADER_BYTES", 20)  # which ends within a letter
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path = write(tmp_path, ' Label ;"Text"\nhäm;ä\xff\n'.encode(encoding)[:40])
        assert read_columns(path)[:1] == ["Label"]
    monkeypatch.undo()
    assert read_columns(path) == ["Label", "Text"]


def test_columns_are_found_by_name(tmp_path):
    table = read_table(write(tmp_path, " LABEL ,Message Body,text\nham,a,b\n"))
    assert find_column(table, None, ("label", "class"), "--label-column") == 0
    assert find_column(table, "messagebody", ("text",), "--text-column") == 1
    assert find_column(table, None, ("text", "body"), "--text-column") == 2
    assert has_column(table.columns, ["label"]) and not has_column(table.columns, ["body"])


@pytest.mark.parametrize("header, given, says", [
    ("v1,v2", None, "no column named text"), ("v1,v2", "v3", "--text-column v3"),
    ("text,Text", None, "2 columns are named 'text'"), ("text,Text", "text", "2 columns are named 'text'"),
    ("text,body", None, "'text', 'body' could all be meant"),
])
def test_columns_that_cannot_be_told_are_listed_with_the_flag(tmp_path, header, given, says):
    table = read_table(write(tmp_path, f"{header}\na,b\n"))
    with pytest.raises(UserError) as error:
        find_column(table, given, ("text", "body"), "--text-column")
    assert says in str(error.value)
    for name in header.split(","):
        assert repr(name) in str(error.value)
    assert "--text-column" in str(error.value) or "rename" in str(error.value)
