"""What is told about early exits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from compressor.errors import ModelError
from compressor.passes.train.early_exit_points import ExitPoint
from compressor.passes.train.early_exit_thresholds import Flags, Thresholds, choose_thresholds
from compressor.types.tensors import Array

_LOWER = (99.9, 99.5, 99.0, 98.0, 97.0, 95.0, 90.0, 80.0, 50.0)


def share_notes(
    points: Sequence[ExitPoint], found: Thresholds, agreement: float
) -> tuple[str, ...]:
    """Say who leaves where, and how many answers are the full network's."""
    parts, notes = [], []
    for point, value, share in zip(points, found.values, found.shares, strict=False):
        if value < inf:
            parts.append(f"exit {point.number} after {point.after} {share:.1f} %")
            continue
        notes.append(
            f"exit {point.number} after {point.after} is left out: with agreement {agreement:g} it "
            "would let nobody leave"
        )
    notes.append(
        f"of {found.samples:,} calibration samples leave at {', '.join(parts)}; all the way go "
        f"{found.shares[-1]:.1f} %"
    )
    notes.append(
        f"{found.agreement:.2f} % of them get the full network's answer, {agreement:g} % are wanted"
    )
    return tuple(notes)


def macs_note(found: Thresholds, costs: Sequence[float]) -> str:
    """Say what exits save, and that a sample which goes all the way costs more than before."""
    reaching = found.samples - np.cumsum([0, *found.left])
    mean, most = float(np.dot(reaching, costs)) / found.samples, float(sum(costs))
    return (
        f"a calibration sample takes {mean / 1e6:.4g} million multiply-accumulates on average and "
        f"{most / 1e6:.4g} million at most, heads included ({100 * mean / max(most, 1):.0f} %); "
        "reports count the most"
    )


def nobody_leaves(agreement: float, sure: Array, same: Flags, costs: Sequence[float]) -> ModelError:
    """Return the error for exits that no sample can leave at, and what would change that."""
    remedy = "train longer, or put exits after later layers"
    for lower in (value for value in _LOWER if value < agreement):
        tried = choose_thresholds(sure, same, lower, costs)
        if sum(tried.left):
            leaving = 100 - tried.shares[-1]
            remedy += f", or set agreement: {lower:g}, with which {leaving:.1f} % would leave"
            break
    return ModelError(
        "pass 'early-exit'",
        f"lets none of {sure.shape[1]:,} calibration samples leave early with agreement "
        f"{agreement:g}",
        remedy,
    )
