"""The options that a layer has: a width, with the columns that share a scale or without, or none.

An option is a text, so that it can be a key of a table and of a file: ``8``, ``4/128`` (4 bits, 128
columns share a scale), ``4/channel`` (a whole row does), ``stored``, ``half``, ``float``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOAT = "float"
"""The option of leaving a layer as it is."""

HALF = "half"
"""The option of leaving a layer as it is, with its weights stored in float16."""

AS_IT_IS = frozenset({FLOAT, HALF})
"""The options that add no noise to speak of."""

STORED = "stored"
"""The option of weights in 8 bits that are computed with as floats: their noise alone is added."""

STORED_WORDS = "stored in 8 bits"
CHANNEL = "channel"
"""In place of a number of columns: a whole row shares a scale."""


def bits_of(option: str) -> int | None:
    """Return the bits of an option's codes; ``None`` where the tuned pass makes none.

    >>> bits_of("4/128"), bits_of(FLOAT)
    (4, None)
    """
    width = option.partition("/")[0]
    return int(width) if width.isdigit() else None


def with_group(width: str, group: int | str) -> str:
    """Return the option of a width and of the columns that share a scale."""
    return f"{width}/{group}"


def rule_of(option: str) -> dict[str, Any]:
    """Return the keys of the rule that gives a layer an option.

    >>> rule_of("4"), rule_of("4/128"), rule_of("float")
    ({'bits': 4}, {'bits': 4, 'group': 128}, {'skip': True})
    """
    width, _, group = option.partition("/")
    if option == FLOAT:
        return {"skip": True}
    rule: dict[str, Any] = {"bits": int(width)}
    if group:
        rule["group"] = group if group == CHANNEL else int(group)
    return rule


def narrow_share(choice: Mapping[str, str]) -> float:
    """Return the share of layers with less than 8 bits.

    >>> narrow_share({"a": "4/128", "b": "8", "c": "float", "d": "4"})
    0.5
    """
    bits = [bits_of(option) for option in choice.values()]
    return sum(b is not None and b < 8 for b in bits) / len(choice)


def option_words(option: str) -> str:
    """Return an option in a few words.

    >>> option_words("4/128"), option_words("4/channel"), option_words("stored")
    ('4 bits in groups of 128', '4 bits a row', 'stored in 8 bits')
    >>> option_words("half")
    'float16'
    """
    width, _, group = option.partition("/")
    named = {FLOAT: "float", HALF: "float16", STORED: STORED_WORDS}
    if option in named:
        return named[option]
    if not group:
        return f"{width} bits"
    return f"{width} bits a row" if group == CHANNEL else f"{width} bits in groups of {group}"


def choice_words(choice: Mapping[str, str]) -> str:
    """Return in a few words which options a choice has, most frequent first.

    >>> choice_words({"a": "4", "b": "8", "c": "4"})
    '2 of 3 layers 4 bits, 1 8 bits'
    """
    counts = {o: sum(v == o for v in choice.values()) for o in dict.fromkeys(choice.values())}
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    (first, most), *others = ordered
    if not others:
        return f"all layers {option_words(first)}"
    rest = ", ".join(f"{number} {option_words(option)}" for option, number in others)
    return f"{most} of {len(choice)} layers {option_words(first)}, {rest}"
