"""The state of a training on disk: whole or not there, the newest kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.files import disk_errors, publish, staging, sync
from compressor.types.data import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

_STATE = "state-"
_PARTIAL = "partial-state"
_PROGRESS = "progress.json"
_BEST = "best.safetensors"


class SavedState:
    """States of one training in a folder of its own.

    Args:
        folder: outlives the process.
        accelerator: knows weights, optimizer and loss scale.
        ranks: the processes that train; the first one publishes what all have written.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, ranks: Ranks):
        self._folder = folder
        self._accelerator = accelerator
        self._ranks = ranks

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Write the state after ``step`` steps, and remove older ones.

        Raises:
            InputError: the disk is full; the state before stays.
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
        for old in self._states():
            if old != target:
                shutil.rmtree(old)

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
