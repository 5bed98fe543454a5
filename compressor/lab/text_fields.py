"""Which fields of JSON Lines are texts, pairs of texts and right answers: by names and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compressor.lab.found_data import LABELS, named

_ANSWERS = (*LABELS, "class", "classes", "tag", "tags")
_SCORES = ("score", "similarity", "relevance", "rating")
_SPANS = ("answer", "answers", "span")
_NO_TEXTS = ("id", "ids", "idx", "index", "guid", "uid", "uuid", "url", "lang", "language", "split")
_SECOND = {
    "premise": ("hypothesis",),
    "claim": ("evidence",),
    "query": ("passage", "document", "doc", "text", "context", "answer", "response"),
    "question": ("context", "passage", "document", "sentence", "paragraph", "answer", "text"),
}
"""What data sets of pairs call the second text, by the name of the first."""
_NUMBERED = re.compile(r"(.*?)[_-]?([1a])", re.IGNORECASE)
_AFTER = {"1": "2", "a": "b", "A": "B"}


def texts_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of texts, and of lists of words, the likeliest first."""
    answers, others = (named(fields, words) for words in (_ANSWERS, _NO_TEXTS))
    texts = [name for name, value in fields.items() if _is_text(value) and name not in answers]
    texts = [name for name in texts if name not in others] or texts
    return tuple(sorted(texts, key=lambda name: name != "text"))


def pair_of(texts: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the first and the second text of a pair, if they are usual ones.

    >>> pair_of(("note", "sentence2", "sentence1"))
    ('sentence1', 'sentence2')
    """
    for first in texts:
        numbered = _NUMBERED.fullmatch(first)
        seconds = [f"{first}_pair", f"{first}-pair", *_SECOND.get(first.lower(), ())]
        if numbered is not None:
            seconds.insert(0, f"{first[: numbered.start(2)]}{_AFTER[numbered[2]]}")
        second = next((t for s in seconds for t in texts if t.lower() == s.lower()), None)
        if second not in (None, first):
            return first, second
    return None


def class_in(fields: Mapping[str, Any]) -> str:
    """Return the field with the class of a text, a whole number or a name; empty without one."""
    return _found(fields, _ANSWERS, lambda value: type(value) in (int, str, bool))


def score_in(fields: Mapping[str, Any]) -> str:
    """Return the field with a number for a text; empty without one."""
    return _found(fields, (*_ANSWERS, *_SCORES), _is_number)


def list_in(fields: Mapping[str, Any]) -> str:
    """Return the field with several numbers, or names of classes; empty without one."""
    return _found(fields, _ANSWERS, lambda value: isinstance(value, list))


def numbers_in(fields: Mapping[str, Any]) -> str:
    """Return the field with several numbers for a text; empty without one."""
    return _found(fields, (*_ANSWERS, *_SCORES, "scores"), _are_numbers)


def span_in(fields: Mapping[str, Any]) -> str:
    """Return the field with the first and the last character of an answer; empty without one."""
    return _found(fields, (*_SPANS, *_ANSWERS), lambda v: _are_numbers(v) and len(v) == 2)


def _found(fields: Mapping[str, Any], words: Sequence[str], fits: Callable[[Any], bool]) -> str:
    found = (name for word in words for name in named(fields, (word,)) if fits(fields[name]))
    return next(found, "")


def _is_text(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) for word in words)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))
