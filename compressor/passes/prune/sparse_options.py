"""Options that passes share which set single weights to zero, and what they mean together."""

from __future__ import annotations

from pydantic import Field

from compressor.errors import SpecError
from compressor.passes.prune.patterns import Pattern, n_of_m
from compressor.types.passes import LayerRule

DEFAULT_SPARSITY = 0.5


class NmRule(LayerRule):
    """A per-layer rule of ``prune-nm``."""

    n: int | None = Field(default=None, ge=1, description="in place of the pass's n")
    m: int | None = Field(default=None, ge=2, description="in place of the pass's m")


class SparseRule(LayerRule):
    """A per-layer rule of a pass that prunes single weights or N of M."""

    sparsity: float | None = Field(
        default=None, gt=0, lt=1, description="in place of what the pass says"
    )
    n: int | None = Field(default=None, ge=1, description="in place of what the pass says")
    m: int | None = Field(default=None, ge=2, description="in place of what the pass says")


def nm_pattern(n: int, m: int, place: str = "") -> Pattern:
    """Return the pattern in which ``n`` of ``m`` weights stay.

    Args:
        n: how many stay.
        m: weights in a group.
        place: the rule that says so, for the message.

    Raises:
        SpecError: all or none would stay.
    """
    if n >= m:
        raise SpecError(
            f"{place}n: {n}, m: {m}",
            f"keeps all of every {m} weights" if n == m else f"{m} weights hold no {n}",
            "give an n below m, such as n: 2, m: 4",
        )
    return n_of_m(n, m)


def sparse_pattern(
    sparsity: float | None, n: int | None, m: int | None, place: str = ""
) -> Pattern | None:
    """Return the pattern that options say; ``None`` if they say nothing.

    Args:
        sparsity: share of the weights that becomes zero.
        n: of ``m`` weights, how many stay.
        m: weights in a group.
        place: the rule that says so, for the message.

    Raises:
        SpecError: they contradict each other, or one of ``n`` and ``m`` is missing.
    """
    if n is None and m is None:
        return None if sparsity is None else Pattern(sparsity)
    if n is None or m is None:
        given, missing = ("m", "n") if n is None else ("n", "m")
        raise SpecError(
            f"{place}{given}: {m if n is None else n}",
            f"is given without {missing}",
            "give both, such as n: 2, m: 4, or give sparsity",
        )
    if sparsity is not None:
        raise SpecError(
            f"{place}sparsity: {sparsity:g}",
            f"is given together with n: {n}, m: {m}, which is a sparsity of {1 - n / m:g}",
            "give one of them",
        )
    return nm_pattern(n, m, place)


def rule_place(rule: LayerRule) -> str:
    """Name a rule in front of one of its options, for messages."""
    return f"layer rule {rule.match!r}: "
