"""Which parameter of a file belongs to which parameter of a network: names only, no arrays.

A Gluon parameter has two names: by structure ("features.0.weight", what save_parameters writes) and in full
("resnetv10_conv0_weight", what export writes as "arg:resnetv10_conv0_weight" or "aux:..."). Full names count
the networks and layers made so far in the process, so the same network has others in the next process.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import Callable, Dict, Iterable, Iterator, List, Sequence


def match(structural: Sequence[str], full: Sequence[str], prefix: str, saved: Iterable[str],
          fits: Callable[[str, str], bool]) -> Dict[str, str]:
    """Structural name -> saved name, for all parameters whose names agree under the best rule, of any shape.

    structural, full: both names of each of the network's parameters, in the same order.
    prefix: the network's own, at the front of its full names.
    saved: names in the file.
    fits: (structural name, saved name) -> whether the shapes agree. The rule with the most such pairs is the
        best, and of two that are equally good the stricter one.
    """
    best: Dict[str, str] = {}
    most = -1
    for own, by_key in _rules(full, prefix, list(saved), structural):
        pairs = {name: by_key[key] for name, key in zip(structural, own) if key in by_key}
        fitting = sum(fits(name, found) for name, found in pairs.items())
        if fitting > most:
            best, most = pairs, fitting
    return best


def _rules(full: Sequence[str], prefix: str, saved: List[str], structural: Sequence[str]) -> Iterator:
    """From strict to lax: the keys of the network's parameters, and key -> saved name."""
    plain = [re.sub("^(arg|aux):", "", name) for name in saved]
    without = [name[len(prefix):] if name.startswith(prefix) else name for name in full]
    yield structural, dict(zip(saved, saved))
    yield full, dict(zip(plain, saved))
    for start in _common_starts(plain):
        rest = [name[start:] for name in plain]
        yield structural, dict(zip(rest, saved))
        yield without, dict(zip(rest, saved))
    yield ranked(full), dict(zip(ranked(plain), saved))
    for start in _common_starts(plain):
        yield ranked(without), dict(zip(ranked([name[start:] for name in plain]), saved))


def _common_starts(names: Sequence[str]) -> List[int]:
    """Lengths of the prefixes, ending in _ or ., that all names have: the longest first, and 0."""
    common = os.path.commonprefix(list(names))
    return [i + 1 for i in reversed(range(len(common))) if common[i] in "_."] + [0]


def ranked(names: Sequence[str]) -> List[str]:
    """The names with each number replaced by its rank among those that stand in the same place.

    So "dense4_weight", "dense7_weight" become "dense0_weight", "dense1_weight".
    """
    split = [re.split(r"(\d+)", name) for name in names]  # text, number, text, number, ..., text
    numbers = defaultdict(set)
    for parts in split:
        for i in range(1, len(parts), 2):
            numbers[tuple(parts[:i])].add(int(parts[i]))
    rank = {place: {n: i for i, n in enumerate(sorted(found))} for place, found in numbers.items()}
    return [
        "".join(str(rank[tuple(parts[:i])][int(part)]) if i % 2 else part for i, part in enumerate(parts))
        for parts in split
    ]
