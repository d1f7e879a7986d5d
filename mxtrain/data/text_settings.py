"""The settings of texts; importable without mxnet."""

import codecs
from dataclasses import dataclass
from typing import Optional

from mxtrain.errors import UserError

_MOST_BUCKETS = 2**24 - 1  # ids travel through float32 in exported networks, which holds whole numbers up to 2^24


@dataclass
class TextConfig:
    """Where the texts of a table are, and how they become numbers."""

    text_column: Optional[str] = None
    """Column of a table that holds the texts (default: the one called text, message, body, mail or the like)."""

    encoding: str = "utf-8"
    """Encoding of a table without a byte order mark, such as cp1252 of Windows; one with a mark is UTF-8 or UTF-16."""

    ngrams: int = 2
    """Neighbouring words that count as one feature, up to so many: 1 for single words, 2 for pairs as well."""

    buckets: int = 2**15
    """Number of features; words and pairs of words share them by a hash of their letters."""

    max_tokens: int = 256
    """Features of a text that are used, first single words, then pairs; what is beyond is cut off and counted."""

    positive: Optional[str] = None
    """With two classes, the one whose F1 is told (default: the rarer one of the training texts); with more it is the
    mean over all classes."""

    def __post_init__(self):
        if not 1 <= self.ngrams <= 5:
            raise UserError(f"--ngrams {self.ngrams}: must be from 1 to 5")
        if not 1 <= self.buckets <= _MOST_BUCKETS:
            raise UserError(f"--buckets {self.buckets}: must be from 1 to {_MOST_BUCKETS}")
        if not 1 <= self.max_tokens <= 65536:
            raise UserError(f"--max-tokens {self.max_tokens}: must be from 1 to 65536")
        for flag, name in (("--text-column", self.text_column), ("--positive", self.positive)):
            if name is not None and not name.strip():
                raise UserError(f"{flag} is empty: give a name, or leave it out")
        check_encoding(self.encoding)


def check_encoding(name: str) -> None:
    """Raises UserError for a name that is not one of Python's text encodings."""
    try:
        codecs.lookup(name)
        b"a".decode(name, "ignore")  # refuses codecs that are not of text
    except (LookupError, ValueError):
        raise UserError(f"--encoding {name}: no such encoding; usual are utf-8, cp1252, latin-1, utf-16") from None
