"""In which order samples are seen, and by which process: a function of seed and step alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compressor.errors import CompressorError, DataError
from compressor.files import disk_errors, publish, staging, sync
from compressor.types.data import Ranks
from compressor.types.training import Rows, TrainingData

if TYPE_CHECKING:
    from accelerate import Accelerator


_HELD_OUT = 0x5E1D  # tells these random numbers from those of the epochs


@dataclass(frozen=True)
class Order:
    """The samples of each step.

    Every epoch is a permutation of its own. Where the samples do not divide into batches, an
    epoch's last batch is smaller; it is left out where not every process would have a sample of
    it, or where the model takes whole batches only.

    Attributes:
        samples: how many there are.
        batch: how many go into a step, over all processes.
        seed: of the permutations.
        held_out: share of the samples that are never trained on.
        parts: the processes that share a step.
        whole: only batches of full size will do.
    """

    samples: int
    batch: int
    seed: int
    held_out: float = 0.0
    parts: int = 1
    whole: bool = False

    @cached_property
    def _shuffled(self) -> Rows:
        rng = np.random.default_rng((self.seed, _HELD_OUT))
        return rng.permutation(self.samples).astype(np.int64)

    @cached_property
    def validation(self) -> Rows:
        """The samples that are held out, ascending."""
        return np.sort(self._shuffled[: round(self.held_out * self.samples)])

    @cached_property
    def trained(self) -> Rows:
        """The samples that are trained on, ascending."""
        return np.sort(self._shuffled[round(self.held_out * self.samples) :])

    @property
    def steps_in_epoch(self) -> int:
        """How many steps an epoch has."""
        full, rest = divmod(len(self.trained), self.batch)
        return full + (rest >= self.parts and not self.whole and rest > 0)

    def rows(self, step: int) -> Rows:
        """Return the samples of a step, over all processes."""
        epoch, index = divmod(step, self.steps_in_epoch)
        return _permuted(self, epoch)[index * self.batch : (index + 1) * self.batch]

    def part(self, step: int, rank: int) -> Rows:
        """Return one process's samples of a step; sizes differ by one at most."""
        return self.rows(step)[rank :: self.parts]


@lru_cache(maxsize=2)
def _permuted(order: Order, epoch: int) -> Rows:
    return np.random.default_rng((order.seed, epoch)).permutation(order.trained)


@dataclass(frozen=True)
class Micro:
    """Samples that go through the network at once.

    Attributes:
        rows: their numbers.
        tensors: inputs, target and whatever else the data has, by name.
    """

    rows: Rows
    tensors: Mapping[str, Tensor]


class Steps(Dataset[tuple[Micro, ...] | CompressorError]):
    """One process's part of each step.

    Args:
        data: the samples.
        order: which ones a step has.
        micro: how many go through the network at once.
        rank: the process.
    """

    def __init__(self, data: TrainingData, order: Order, micro: int, rank: int):
        self._data = data
        self._order = order
        self._micro = micro
        self._rank = rank

    def __getitem__(self, step: int) -> tuple[Micro, ...] | CompressorError:
        """Return the parts that a step is done in, or what is wrong with its samples.

        An error that is raised in a process of its own would come back as PyTorch's.
        """
        try:
            return self._micros(step)
        except CompressorError as error:
            return error

    def _micros(self, step: int) -> tuple[Micro, ...]:
        rows = self._order.part(step, self._rank)
        seed = (self._order.seed, step, self._rank)
        tensors = as_tensors(self._data.batch(rows, seed), len(rows))
        found = []
        for start in range(0, len(rows), self._micro):
            part = slice(start, start + self._micro)
            found.append(Micro(rows[part], {name: t[part] for name, t in tensors.items()}))
        return tuple(found)


def as_tensors(batch: Mapping[str, np.ndarray], samples: int) -> dict[str, Tensor]:
    """Return arrays as tensors; text and other objects stay behind.

    Raises:
        DataError: an array has another number of samples.
    """
    found = {}
    for name, array in batch.items():
        if array.dtype.kind not in "fiub":
            continue
        if len(array) != samples:
            raise DataError(
                f"training data, array {name!r}",
                f"has {len(array)} samples, and {samples} were asked for",
                "let the transform return as many as it gets",
            )
        found[name] = torch.from_numpy(np.ascontiguousarray(array))
    return found


def read_steps(steps: Steps, start: int, stop: int, workers: int) -> Iterator[tuple[Micro, ...]]:
    """Yield the steps from ``start`` on, read ahead by so many processes.

    Raises:
        DataError: a step's samples cannot be had.
    """
    loader = DataLoader(
        steps,
        batch_size=None,
        sampler=range(start, stop),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    for found in loader:
        if isinstance(found, CompressorError):
            raise found
        yield found


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
