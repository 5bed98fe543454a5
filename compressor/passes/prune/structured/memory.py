"""What measuring and solving take at most, for the plan."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.errors import listed
from compressor.graph.blocks import partition
from compressor.passes.prune.structured.consumers import possible_consumers
from compressor.passes.prune.structured.moments import AT_ONCE, rows_of
from compressor.passes.prune.structured.reconstruction import HELD
from compressor.passes.prune.structured.solving import FOLDS
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup

_DOUBLE = 8  # bytes
_WORKING = 4  # matrices that are there while one layer is solved
_SINGLE = 4  # bytes
_STATES = 16  # of a layer that are looked at, such as the widths that its kernels tell apart


def planned(
    carrier: Carrier,
    groups: Sequence[ChannelGroup],
    *,
    scored: bool = False,
    dropping: bool = False,
) -> tuple[tuple[str, ...], int]:
    """Return which readers of groups will not be solved and why, and the bytes that solving takes.

    These are at most the moments of a block's layers, or of those that are scored at once, what
    one solution needs, and solutions that are held where losses are measured.

    Args:
        scored: losses are measured.
        dropping: of dropped blocks, too.
    """
    consumers, reasons = possible_consumers(carrier, groups, changed=True)
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    notes = tuple(
        f"where inputs of {listed(layers, 3)} go, what remains is not solved: {reason}"
        for reason, layers in names.items()
    )
    squares = {c.layer.weight: _DOUBLE * c.layer.groups * c.layer.columns**2 for c in consumers}
    blocks = partition(carrier.graph(), past_sizes=True)
    together = (sum(squares.get(name, 0) for name in block.weights) for block in blocks)
    at_once = min(sum(squares.values()), AT_ONCE) if scored else 0
    held_moments = max(FOLDS * max(together, default=0), at_once)
    bound = held_moments + _WORKING * max(squares.values(), default=0)
    held = sum(
        _SINGLE * rows_of(c.layer.columns) * (c.layer.groups * c.layer.columns + c.layer.rows)
        for c in consumers
        if c.bounds is not None
    )
    changing = sum(_SINGLE * c.layer.columns * c.layer.rows for c in consumers) if scored else 0
    solutions = _held_bytes(changing) * (2 if dropping else 1)
    return notes, bound + min(held, HELD) + solutions


def _held_bytes(each: int) -> int:
    """Return about what is held of solutions, given the bytes of all parameters that change."""
    return min(_STATES * each, AT_ONCE)
