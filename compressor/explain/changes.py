"""What can be done about a layer: leave it as it is, or give it more bits; as lines of a spec."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from compressor.types.layer_rules import match_of, rule_class
from compressor.types.passes import LayerRule, Pass

_WIDE = 8
_FULL = 32
_INTEGER = re.compile(r"u?int(\d+)/")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True)
class Change:
    """A rule for one layer, to be put in front of a pass's rules.

    Attributes:
        index: place of the pass in the spec.
        layer: the layer's name.
        keys: what the rule says beside its ``match``.
        kept: how much of the layer's noise remains, as a share of its power.
        cost: bytes it takes, as a share of what leaving the layer out takes.
    """

    index: int
    layer: str
    keys: Mapping[str, Any]
    kept: float = 0.0
    cost: float = 1.0

    @property
    def text(self) -> str:
        """The change in a few words, such as ``bits: 8``."""
        return ", ".join(f"{key}: {_scalar(value)}" for key, value in self.keys.items())

    @property
    def line(self) -> str:
        """The rule as an item of a YAML list."""
        return f"- {{match: {_scalar(match_of(self.layer))}, {self.text}}}"

    def applied(self, declared: Pass) -> Pass:
        """Return the pass with the rule in front of its own."""
        rules = rule_class(type(declared))
        assert rules is not None
        rule = rules.model_validate({"match": match_of(self.layer), **self.keys})
        own: tuple[LayerRule, ...] = declared.layers  # type: ignore[attr-defined]  # has rules
        return declared.model_copy(update={"layers": (rule, *own)})


def change_for(index: int, declared: type[Pass], layer: str, scheme: str) -> Change:
    """Choose what to do about a layer: 8 bits where it has fewer and may, else leave it out.

    Each bit more halves the step of rounding, and so leaves a quarter of the noise's power.

    Args:
        index: place of the pass in the spec.
        declared: the pass.
        layer: the layer's name.
        scheme: how the pass stores it, such as ``int4/group 32``.
    """
    narrow = _INTEGER.match(scheme)
    rules = rule_class(declared)
    if narrow and rules is not None and int(narrow[1]) < _WIDE and _takes(rules, _WIDE):
        bits = int(narrow[1])
        cost = (_WIDE - bits) / (_FULL - bits)
        return Change(index, layer, {"bits": _WIDE}, 4.0 ** (bits - _WIDE), cost)
    return Change(index, layer, {"skip": True})


def yaml_lines(changes: Sequence[Change], indent: str = "") -> list[str]:
    """Return rules of one pass as the lines of its ``layers``."""
    return [f"{indent}layers:", *(f"{indent}  {change.line}" for change in changes)]


def _takes(rules: type[LayerRule], bits: int) -> bool:
    field = rules.model_fields.get("bits")
    choices = [] if field is None else [c for a in get_args(field.annotation) for c in get_args(a)]
    return bits in choices


def _scalar(value: Any) -> str:
    """Write a value so that YAML reads the same."""
    plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
