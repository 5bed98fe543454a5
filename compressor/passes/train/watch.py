"""What a training watches: its losses, its best validation, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether the user wants the training to end."""

    def __init__(self) -> None:
        self.wanted = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: it is the second one, so there is no time to save anything.
        """
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


@contextmanager
def deferred_interrupts() -> Iterator[Interruption]:
    """Yield a flag that SIGINT and SIGTERM set, instead of ending the process at once.

    What would end the process if nothing came of a signal hears of none meanwhile. Outside the main
    thread nothing changes: only the main thread receives signals.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    watcher = signal.set_wakeup_fd(-1)
    before = {number: signal.signal(number, interruption.note) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(watcher, warn_on_full_buffer=False)


_FEWEST = 10  # losses before one can be called large
_RECENT = 100
_EXPLODED = 1000.0
_SHOWN = 5
_PARTS = 10  # of the training: the first and the last are compared
_GROWN = 1.5


def divergence(loss: float, before: Sequence[float]) -> str:
    """Return the problem of a step's loss; empty if there is none.

    A loss diverges if it is not finite, or a thousand times the median of the last hundred, signs
    aside.
    """
    if not isfinite(loss):
        return f"the loss is {loss}"
    recent = [abs(each) for each in before[-_RECENT:]]
    if len(recent) >= _FEWEST and loss > _EXPLODED * max(median(recent), 1e-12) and loss > 1:
        return f"the loss has grown to {loss:.3g}"
    return ""


def growth(losses: Sequence[float]) -> str:
    """Return a note if a training ended with a larger loss than it began with; else nothing.

    Medians of the first and the last tenth are compared, so that a batch that happens to be hard
    does not count as growth.
    """
    part = len(losses) // _PARTS
    if part < 1:
        return ""
    first, last = median(losses[:part]), median(losses[-part:])
    if last - first <= (_GROWN - 1) * abs(first):  # a loss of the user's own may be negative
        return ""
    return (
        f"the loss grew from {first:.4g} to {last:.4g}: training made the network worse; "
        "lower learning-rate, or clip gradients (clip: 1)"
    )


def last_losses(before: Sequence[float]) -> str:
    """Return the last losses as text, for messages."""
    return ", ".join(f"{loss:.4g}" for loss in before[-_SHOWN:]) or "none"


@dataclass
class Best:
    """The best of a training's validations."""

    higher_is_better: bool
    history: list[tuple[int, float]] = field(default_factory=list)  # step and value of all so far

    @property
    def step(self) -> int:
        """The step of the best value, the first of equal ones; 0 before any."""
        best = max if self.higher_is_better else min
        return best(self.history, key=lambda entry: entry[1], default=(0, 0.0))[0]

    @property
    def since(self) -> int:
        """How many validations have come after it."""
        best = self.step
        return sum(step > best for step, _ in self.history)
