"""Whether a training goes well: divergence, the best state so far, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

_KNOWN = 10  # losses before one can be called large
_LOOKED_AT = 100
_EXPLODED = 1000.0
_SHOWN = 5
_PART = 10  # of the training: the first and the last of so many are compared
_GROWN = 1.5


def divergence(loss: float, before: Sequence[float]) -> str:
    """Say what is wrong with a loss; empty if nothing is.

    Args:
        loss: of the step.
        before: those of the steps before.

    Returns:
        That it is not a number or infinite, or a thousand times the median of the last hundred.
    """
    if not isfinite(loss):
        return f"the loss is {loss}"
    recent = before[-_LOOKED_AT:]
    if len(recent) >= _KNOWN and loss > _EXPLODED * max(median(recent), 1e-12) and loss > 1:
        return f"the loss has grown to {loss:.3g}"
    return ""


def growth(losses: Sequence[float]) -> str:
    """Say that a training ended with a larger loss than it began with; empty if it did not.

    Args:
        losses: of all steps. Medians of the first and the last tenth are compared, so that a
            batch that is hard by chance is no growth.
    """
    part = len(losses) // _PART
    if part < 1:
        return ""
    first, last = median(losses[:part]), median(losses[-part:])
    if last <= _GROWN * first:
        return ""
    return (
        f"the loss grew from {first:.4g} to {last:.4g}: training made the network worse; "
        "lower learning-rate, or clip gradients (clip: 1)"
    )


def last_losses(before: Sequence[float]) -> str:
    """Show the last losses, for messages."""
    return ", ".join(f"{loss:.4g}" for loss in before[-_SHOWN:]) or "none"


@dataclass
class Best:
    """The best validation so far.

    Attributes:
        higher_is_better: direction.
        value: the best value; ``None`` before the first.
        step: when it was had.
        since: how many validations have come since.
        history: step and value of all.
    """

    higher_is_better: bool
    value: float | None = None
    step: int = 0
    since: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)

    def note(self, step: int, value: float) -> bool:
        """Take a value, and tell whether it is the best."""
        self.history.append((step, value))
        known = self.value
        better = known is None or (value > known if self.higher_is_better else value < known)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def as_json(self) -> dict[str, Any]:
        """Return all but the direction."""
        return {
            "value": self.value,
            "step": self.step,
            "since": self.since,
            "history": [list(entry) for entry in self.history],
        }

    def restore(self, document: dict[str, Any]) -> None:
        """Take what :meth:`as_json` returned."""
        self.value, self.step = document["value"], document["step"]
        self.since = document["since"]
        self.history = [(int(step), float(value)) for step, value in document["history"]]
