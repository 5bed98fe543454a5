"""Single decisions: which the compressed model took otherwise, and how each class fares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.run.metrics.metrics import Metric
from compressor.types.tensors import Array, Batch

MOST_SAMPLES = 24
_MOST_CLASSES = 1000
_NONE = -1  # in place of a class: there is no target


@dataclass(frozen=True)
class Decisions:
    """One decision for each sample; where a sample holds many, the one that was overturned hardest.

    Attributes:
        classes: int32 ``[N, 4]``: the decision's place in the sample, its target (-1 without one),
            the float model's class and the candidate's.
        margins: float32 ``[N]``: how much higher the float model scored its own class than the
            candidate's; 0 where they agree.
        single: each sample holds one decision.
        choices: how many classes there are.
    """

    classes: Array
    margins: Array
    single: bool
    choices: int

    @property
    def flipped(self) -> Array:
        """Which samples hold a decision that was taken otherwise, ``[N]``."""
        return np.asarray(self.classes[:, 2] != self.classes[:, 3])

    @property
    def labelled(self) -> bool:
        """There are targets."""
        return bool((self.classes[:, 1] != _NONE).any())


def decisions_of(
    outputs: Batch, expected: Batch, target: object, metric: Metric
) -> Decisions | None:
    """Return the decisions in a batch; ``None`` where the metric is not about classes.

    Args:
        target: labels of the decisions, or anything else.
    """
    if not metric.about_classes:
        return None
    ours, theirs = (next(iter(o.values())) for o in (outputs, expected))
    single, size = ours.ndim == 2, len(ours)
    own, other = ours.argmax(axis=-1), theirs.argmax(axis=-1)
    labels = np.full(own.shape, _NONE)
    if isinstance(target, np.ndarray) and target.size == own.size:
        labels = target.reshape(own.shape).astype(np.int64)  # unsigned ones cannot be _NONE
    scores = [np.take_along_axis(theirs, c[..., None], axis=-1)[..., 0] for c in (other, own)]
    margins = (scores[0].astype(np.float32) - scores[1]).reshape(size, -1)
    margins[(labels < 0).reshape(size, -1)] *= 1.0 if (labels < 0).all() else 0.0  # padding
    place = margins.argmax(axis=1)
    picked = [a.reshape(size, -1)[np.arange(size), place] for a in (labels, other, own)]
    picked[0] = np.maximum(picked[0], _NONE)
    classes = np.stack([place, *picked], axis=1).astype(np.int32)
    return Decisions(classes, margins[np.arange(size), place], single, ours.shape[-1])


def joined(parts: list[Decisions | None]) -> Decisions | None:
    """Return the decisions of all batches together."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Decisions(
        np.concatenate([part.classes for part in known]),
        np.concatenate([part.margins for part in known]),
        known[0].single,
        known[0].choices,
    )


def flipped_entry(decisions: Decisions | None, artifact: str) -> dict[str, Any] | None:
    """Return the entry of ``report.json`` on samples whose decision flipped, the worst first.

    Worst are those that only the float model had right, and of these the ones of which it was most
    certain; where the metric is not about classes, there is no entry.
    """
    if decisions is None:
        return None
    _, target, theirs, ours = decisions.classes.T
    flipped = decisions.flipped
    lost = flipped & (theirs == target)
    order = np.lexsort((-decisions.margins, ~lost))
    shown = order[flipped[order]][:MOST_SAMPLES]
    labelled = decisions.labelled
    return {
        "artifact": artifact,
        "samples": int(flipped.size),
        "flipped": int(flipped.sum()),
        "lost": int(lost.sum()) if labelled else None,
        "won": int((flipped & (ours == target)).sum()) if labelled else None,
        "worst": [
            {
                "index": int(i),
                "place": None if decisions.single else int(decisions.classes[i, 0]),
                "target": int(target[i]) if target[i] != _NONE else None,
                "float": int(theirs[i]),
                "artifact": int(ours[i]),
                "margin": float(decisions.margins[i]),
            }
            for i in shown
        ],
    }


def class_entries(decisions: Decisions | None) -> list[Mapping[str, Any]] | None:
    """Return the entry of ``report.json`` on each class, those that lost most first.

    Accuracies and their changes are in percent. ``None`` without labels, where samples hold many
    decisions, and for very many classes.
    """
    if decisions is None or not decisions.single or not decisions.labelled:
        return None
    _, target, theirs, ours = decisions.classes.T
    entries = []
    for label in np.unique(target[target != _NONE]):
        of = target == label
        before, after = (100.0 * float((given[of] == label).mean()) for given in (theirs, ours))
        entries.append(
            {
                "class": int(label),
                "samples": int(of.sum()),
                "float": before,
                "artifact": after,
                "change": after - before,
            }
        )
    if len(entries) > _MOST_CLASSES:
        return None
    return sorted(entries, key=lambda entry: (entry["change"], entry["artifact"]))
