"""What pruning each group alone costs, measured at the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.passes.prune.selection import Queue
from compressor.run.evaluate import ratio_db
from compressor.types.channels import Flags
from compressor.types.tensors import Batch

SHARES = (0.25, 0.5, 0.75)
"""Shares of a group's units at which it is tried."""
_SHOWN = 5


@dataclass(frozen=True)
class Sensitivity:
    """What it costs to remove units of one group alone.

    Attributes:
        name: the group.
        losses: power of the outputs' change over that of the outputs, one for each of ``SHARES``.
    """

    name: str
    losses: tuple[float, ...]

    @property
    def sqnr_db(self) -> tuple[float | None, ...]:
        """The same as signal to noise in dB; ``None`` where nothing changed."""
        return tuple(ratio_db(1.0, loss) for loss in self.losses)


def scan(
    masked: Callable[[Flags], Batch], queues: Sequence[tuple[str, Queue]], count: int
) -> tuple[Sensitivity, ...]:
    """Zero the least important units of each group alone and compare the outputs.

    H. Li et al., Pruning filters for efficient ConvNets, 2017 (arXiv:1608.08710), section 3.2,
    find by the same experiment which layers to prune less; there with accuracy.

    Args:
        masked: outputs of the model with units zeroed, always on the same batch.
        queues: each group's name, and its units in the order in which they go.
        count: units of the model.
    """
    reference = masked(np.zeros(count, dtype=bool))
    found = []
    for name, queue in queues:
        losses = []
        for share in SHARES:
            flags = np.zeros(count, dtype=bool)
            flags[queue.units[: round(share * len(queue.units))]] = True
            losses.append(relative_error(reference, masked(flags)))
        found.append(Sensitivity(name, tuple(losses)))
    return tuple(found)


def relative_error(reference: Batch, other: Batch) -> float:
    """Return the power of the difference of all float outputs over the reference's power."""
    signal = error = 0.0
    for ours, theirs in zip(reference.values(), other.values(), strict=True):
        if ours.dtype.kind != "f":
            continue
        finite = np.isfinite(ours) & np.isfinite(theirs)
        wanted = ours[finite].astype(np.float64)
        signal += float(np.square(wanted).sum())
        error += float(np.square(wanted - theirs[finite]).sum())
    return error / signal if signal > 0 else 0.0


def ranking_note(found: Sequence[Sensitivity]) -> str:
    """Say which groups cost most and least with half of their units gone."""
    middle = SHARES.index(0.5)
    ranked = sorted(found, key=lambda s: -s.losses[middle])

    def shown(part: Sequence[Sensitivity]) -> str:
        levels = ((s.name, s.sqnr_db[middle]) for s in part)
        return ", ".join(f"{n} {'no change' if db is None else f'{db:.1f} dB'}" for n, db in levels)

    if len(ranked) <= 2 * _SHOWN:
        return f"signal to noise with half of a group's units zeroed: {shown(ranked)}"
    return (
        f"signal to noise with half of a group's units zeroed, most sensitive first: "
        f"{shown(ranked[:_SHOWN])}; least: {shown(ranked[-_SHOWN:])}"
    )
