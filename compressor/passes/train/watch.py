"""What a training keeps and watches: its losses, its best and its newest state, and Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.files import disk_errors, publish, staging, sync
from compressor.types.data import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

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

    Outside the main thread nothing changes: only the main thread receives signals.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption.note) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_FEWEST = 10  # losses before one can be called large
_RECENT = 100
_EXPLODED = 1000.0
_SHOWN = 5
_PARTS = 10  # of the training: the first and the last are compared
_GROWN = 1.5


def divergence(loss: float, before: Sequence[float]) -> str:
    """Return what is wrong with a step's loss; empty if nothing is.

    A loss diverges if it is not finite, or a thousand times the median of the last hundred.
    """
    if not isfinite(loss):
        return f"the loss is {loss}"
    recent = before[-_RECENT:]
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
    if last <= _GROWN * first:
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


_STATE = "state-"
_PARTIAL = "partial-state"
_PROGRESS = "progress.json"
_BEST = "best.safetensors"


class SavedState:
    """The states of one training, in a folder of its own that outlives the process.

    The accelerator holds weights, optimizer and loss scale. The first process publishes what all
    have written.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, ranks: Ranks):
        self._folder = folder
        self._accelerator = accelerator
        self._ranks = ranks

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Write the state after ``step`` steps, and remove older ones.

        Raises:
            InputError: the disk is full; the previous state stays.
        """
        partial = self._folder / _PARTIAL
        with disk_errors(self._folder):
            if self._ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._ranks.wait()
            self._accelerator.save_state(str(partial))
            self._ranks.wait()
            if self._ranks.rank == 0:
                text = json.dumps({"step": step, **progress})
                (partial / _PROGRESS).write_text(text, encoding="utf-8")
                self._publish(partial, step)
        self._ranks.wait()

    def _publish(self, partial: Path, step: int) -> None:
        for file in partial.rglob("*"):
            sync(file)
        target = self._folder / f"{_STATE}{step:09d}"
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
        sync(self._folder)
        for state in self._states():
            if state != target:
                shutil.rmtree(state)

    def restore(self) -> dict[str, Any] | None:
        """Load the newest state; return what was saved with it, or ``None`` if there is none."""
        states = self._states()
        if not states:
            return None
        # Names with dots look to PyTorch as if they were submodules' that it does not have.
        self._accelerator.load_state(str(states[-1]), strict=False)
        document: dict[str, Any] = json.loads((states[-1] / _PROGRESS).read_text(encoding="utf-8"))
        return document

    def _states(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_STATE}*"))

    def save_best(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep weights as the best so far."""
        if self._ranks.rank == 0:
            with staging(self._folder) as folder:
                staged = folder / _BEST
                save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, staged)
                publish(staged, self._folder / _BEST)
        self._ranks.wait()

    def best(self) -> dict[str, Tensor]:
        """Return the best weights."""
        return load_file(self._folder / _BEST)
