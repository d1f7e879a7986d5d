"""What programs say instead of a traceback."""

import difflib


class UserError(Exception):
    """A user's mistake. Its text is the single line that the user reads.

    The text names the flag, file or row, the value received and the values allowed. Programs print it on
    stderr and exit with code 2; a traceback is for our own bugs.
    """


class BadSample(UserError):
    """A sample that cannot be read. Its text names the file, or the file and its record or row, and says why."""


class TrainingError(Exception):
    """Training cannot go on, through no fault of the command: its text is one line; programs exit with code 1."""


class Elsewhere(TrainingError):
    """Training ends only because another process cannot go on, which says why itself: programs say nothing, and exit
    with code 75."""


class LostPeer(Elsewhere):
    """Another process has gone and may not have said why: programs print this too."""


def nearest(name: str, allowed) -> str:
    """The part of an error message that helps with a misspelled name: the likeliest allowed ones, or all if few."""
    close = difflib.get_close_matches(name, list(allowed), n=4, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "allowed are " + ", ".join(sorted(allowed)) if len(allowed) <= 20 else f"none of {len(allowed)} is near it"
