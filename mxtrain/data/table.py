"""Tables in text files: CSV, TSV and `;`, read whole and strictly.

What cannot be read for sure is refused with its line: a table that is read wrongly trains without complaint.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import sys
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

from mxtrain.errors import UserError

EXTENSIONS = (".csv", ".tsv", ".txt")

TEXT_COLUMNS = ("text", "message", "body", "mail", "email", "content", "sms", "sentence", "review", "comment", "tweet")
LABEL_COLUMNS = ("label", "class", "category", "target")
IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "filepath", "image_path")
"""Usual names of columns, for find_column."""

_HEADER_BYTES = 2**16
_LINES_TO_JUDGE = 20  # by which a table is told from prose
_DELIMITERS = {"\t": "tabs", ";": "semicolons", ",": "commas"}
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class Table(NamedTuple):
    """A table with a header. Fields are text as it stands in the file, with line ends as "\\n"."""

    path: str
    columns: List[str]
    """Names of the columns, without spaces around them; trailing columns without a name are left out."""
    rows: List[List[str]]
    """One list per row, as long as `columns`. Blank lines are no rows."""
    lines: List[int]
    """Line of the file, from 1, in which each row begins."""
    notes: List[str]
    """What a user should know, one line each."""


class _Broken(Exception):
    """A line, from 1, and what is wrong with it."""

    def __init__(self, line: int, what: str):
        super().__init__(f"line {line}: {what}")


def read_table(path: str, delimiter: Optional[str] = None, encoding: str = "utf-8") -> Table:
    """Reads a table whose first line names its columns.

    delimiter: between fields; by default a tab where the first line has one, else what it has more of, ; or ,.
    encoding: of a file without a byte order mark; with one it is UTF-8 or UTF-16.

    Fields may be quoted as in CSV, with line ends and doubled quotes inside. Between tabs a quote is text, as in files
    that know no quoting, unless all fields that begin with one are properly closed.

    Raises UserError, with the line, for bytes that are not text, a quote that is not closed, and rows with more or
    fewer fields than the first line.
    """
    text = _decode(path, encoding)
    delimiter = delimiter or _delimiter(text)
    try:
        header, rows, lines = _parse(text, delimiter)
        columns = [name.strip() for name in header]
        while columns and not columns[-1]:
            columns.pop()
        rows, lines, blank = _without_blank(rows, lines, len(header))
        _check_lengths(rows, lines, len(columns), len(header), delimiter)
    except _Broken as error:
        raise UserError(f"{path}, {error}") from None
    if not rows:
        raise UserError(f"{path}: no rows below its first line, which names the columns ({_quoted(columns)})")
    beyond = [line for row, line in zip(rows, lines) if any(field.strip() for field in row[len(columns):])]
    notes = []
    if beyond:
        notes.append(f"{path}: {len(beyond)} rows have text in columns without a name, which is not used; the first is "
                     f"line {beyond[0]}")
    if blank:
        notes.append(f"{path}: {blank} rows without any text are left out")
    return Table(os.fspath(path), columns, [row[:len(columns)] for row in rows], lines, notes)


def read_columns(path: str, encoding: str = "utf-8") -> List[str]:
    """The names in the first line of a table, at no more than the cost of a line. UserError as for read_table."""
    text = _decode(path, encoding, first=_HEADER_BYTES)
    line = next(line for line in text.split("\n") if line.strip())
    return [name.strip() for name in next(csv.reader([line], delimiter=_delimiter(line)))]


def is_prose(path: str) -> bool:
    """Whether a text file is no table, by its first lines: the first one has no delimiter, or neither a usual name of a
    column nor as many fields as all others. UserError for what is no text."""
    lines = [line for line in _decode(path, "utf-8", first=_HEADER_BYTES).split("\n") if line.strip()][:_LINES_TO_JUDGE]
    delimiter = _delimiter(lines[0])
    columns, *rows = (next(csv.reader([line], delimiter=delimiter)) for line in lines)
    if len(columns) == 1 or not rows:
        return True
    return not has_column(columns, TEXT_COLUMNS + IMAGE_COLUMNS) and any(len(row) != len(columns) for row in rows)


def find_column(table: Table, given: Optional[str], names: Sequence[str], flag: str) -> int:
    """The index of the column `given`, else of the only one with one of the usual `names`.

    Capitals and spaces do not count. Raises UserError, with the columns found and the flag that names one, when there
    is none or more than one.
    """
    wanted = {_folded(name) for name in ([given] if given else names)}
    found = [i for i, name in enumerate(table.columns) if _folded(name) in wanted]
    if len(found) == 1:
        return found[0]
    columns = _quoted(table.columns)
    if len({_folded(table.columns[i]) for i in found}) == 1:
        name = table.columns[found[0]]
        raise UserError(f"{table.path}: {len(found)} columns are named {name!r}: rename all but one; its columns are "
                        f"{columns}")
    if found:
        raise UserError(f"{table.path}: {_quoted([table.columns[i] for i in found])} could all be meant; {flag} says "
                        f"which; its columns are {columns}")
    if given:
        raise UserError(f"{flag} {given}: {table.path} has no such column; its first line has {columns}")
    usual = " or ".join(names[:3])
    raise UserError(f"{table.path}: no column named {usual}; its first line has {columns}; {flag} says which it is (if "
                    "that line is a row already, add one above it that names the columns)")


def has_column(columns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a column has one of the names; capitals and spaces do not count."""
    return bool({_folded(name) for name in names} & {_folded(name) for name in columns})


def _decode(path: str, encoding: str, first: int = -1) -> str:
    """The text of a file, without its byte order mark and with line ends as "\\n".

    first: bytes to read; all by default.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(first)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for mark, name in _MARKS:
        if data.startswith(mark):
            data, encoding = data[len(mark):], name
            break
    try:
        text = data.decode(encoding, "strict" if first < 0 else "ignore")  # the last letter may be half
    except UnicodeDecodeError as error:
        line = _line_of(data[:error.start].decode(encoding, "replace"))
        raise UserError(f"{path}, line {line}: byte 0x{data[error.start]:02x} is not {encoding.upper()}: convert the "
                        "file (iconv -f cp1252 -t utf-8) or, for texts, name its --encoding") from None
    if "\0" in text:
        raise UserError(f"{path}, line {_line_of(text[:text.index(chr(0))])}: holds a NUL character: it is no text "
                        "file, or damaged, or UTF-16 without a byte order mark")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UserError(f"{path}: is empty")
    return text


def _line_of(before: str) -> int:
    return before.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1


def _delimiter(text: str) -> str:
    """What separates the fields of the first line that is not blank."""
    line = next(line for line in text.split("\n") if line.strip())
    outside = "".join(line.split('"')[::2])
    if "\t" in outside:
        return "\t"
    return ";" if outside.count(";") > outside.count(",") else ","


def _parse(text: str, delimiter: str) -> Tuple[List[str], List[List[str]], List[int]]:
    """-> header, rows, lines in which the rows begin."""
    if delimiter != "\t":
        records, lines = _records(text, delimiter, quoting=True)
        return records[0], records[1:], lines[1:]
    records, lines = _records(text, delimiter, quoting=False)
    width = len(records[0])
    uneven = next((i for i, record in enumerate(records) if len(record) != width and "".join(record).strip()), None)
    if uneven is None and not all(_closed(field) for record in records for field in record):
        return records[0], records[1:], lines[1:]
    # Either nothing is quoted, or every quote is closed within its field, or fields with line ends need quoting.
    try:
        records, lines = _records(text, delimiter, quoting=True)
    except _Broken as error:
        raise _Broken(lines[uneven], f"{_fields(records[uneven])}, the first line has {width} (quotes are read as "
                                     f"text here; read as CSV's, {error})") from None
    return records[0], records[1:], lines[1:]


def _records(text: str, delimiter: str, quoting: bool) -> Tuple[List[List[str]], List[int]]:
    """All records but blank lines, and the line in which each begins."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True,
                        quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE)
    records, lines, start = [], [], 1
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a mail may be longer than csv's 131,072 characters
    try:
        for record in reader:
            if record and not "".join(record).isspace():  # what is left of a blank line; "" in quotes is a field
                records.append(record)
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error:
        raise _Broken(start, "a quote is not closed, or text follows a closing quote (lines "
                             f"{start} to {reader.line_num}; inside a quoted field, quotes are doubled)") from None
    finally:
        csv.field_size_limit(limit)
    return records, lines


def _closed(field: str) -> bool:
    """Whether a field, read as text, is a whole quoted field or begins with no quote."""
    if not field.startswith('"'):
        return True
    return len(field) > 1 and field.endswith('"') and '"' not in field[1:-1].replace('""', "")


def _without_blank(rows: List[List[str]], lines: List[int], width: int) -> Tuple[List[List[str]], List[int], int]:
    """Without rows such as `,,,`, which spreadsheets write below the last one; and how many there were."""
    if width == 1:
        return rows, lines, 0
    kept = [(row, line) for row, line in zip(rows, lines) if any(field.strip() for field in row)]
    return [row for row, _ in kept], [line for _, line in kept], len(rows) - len(kept)


def _check_lengths(rows, lines, least: int, most: int, delimiter: str) -> None:
    for row, line in zip(rows, lines):
        if not least <= len(row) <= most:
            raise _Broken(line, f"{_fields(row)} between {_DELIMITERS.get(delimiter, repr(delimiter))}, the first "
                                f"line has {least}")


def _fields(row: List[str]) -> str:
    return f"{len(row)} field{'s' * (len(row) != 1)}"


def _folded(name: str) -> str:
    return "".join(name.split()).casefold()


def _quoted(names: Sequence[str]) -> str:
    """Up to ten names, quoted and cut: enough to see what is meant."""
    shown = ", ".join(repr(name if len(name) <= 30 else name[:27] + "...") for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
