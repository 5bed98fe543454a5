"""A training as data: the module, what it is trained for, and the samples of each step.

Which samples a step has, and in which process, is a function of the seed and the step alone."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from compressor.errors import CompressorError, DataError
from compressor.models.element_types import of_numpy
from compressor.passes.train.mixup import Mixed, Mixup
from compressor.passes.train.watch import growth
from compressor.types.tensors import below
from compressor.types.training import Handed, Measure, Rows, TrainingData

PREFIX = "module."
"""What a :class:`NamedModule` puts before the model's own names."""

_HELD_OUT = 0x5E1D  # sets these random numbers apart from those of the epochs
_MOST_LOSSES = 500


@dataclass(frozen=True)
class Order:
    """The samples of each step.

    Every epoch is a permutation of its own. If the samples do not divide into batches, an epoch's
    last batch is smaller. It is left out if some process would have none of its samples, or only
    one, of which batch norm has no statistics, or if the model takes whole batches only. A share is
    held out: these samples are never trained on.
    """

    samples: int
    batch: int  # how many samples go into a step, over all processes
    seed: int
    held_out: float = 0.0
    parts: int = 1  # the processes that share a step
    whole: bool = False  # batches must have full size

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
        fewest = min(2 * self.parts, self.batch)
        return full + (rest >= fewest and not self.whole)

    def rows(self, step: int) -> Rows:
        """Return the samples of a step, over all processes."""
        epoch, index = divmod(step, self.steps_in_epoch)
        return _permuted(self, epoch)[index * self.batch : (index + 1) * self.batch]

    def part(self, step: int, rank: int) -> Rows:
        """Return one process's samples of a step; sizes differ by one at most."""
        return self.rows(step)[rank :: self.parts]

    def blocks(self, rows: Rows, size: int) -> list[tuple[Rows, int]]:
        """Return samples in blocks, and how many of each count.

        Where the model takes whole batches only, the last is filled with samples that it has.
        """
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [(np.resize(part, size) if self.whole else part, len(part)) for part in parts]


@lru_cache(maxsize=2)
def _permuted(order: Order, epoch: int) -> Rows:
    return np.random.default_rng((order.seed, epoch)).permutation(order.trained)


@dataclass(frozen=True)
class Micro:
    """Samples that go through the network at once.

    Attributes:
        rows: their numbers.
        tensors: inputs, target and whatever else the data have, by name.
        mixed: what the inputs have been blended with, if they have.
    """

    rows: Rows
    tensors: Mapping[str, Tensor]
    mixed: Mixed | None = None

    def divided(self, size: int) -> tuple[Micro, ...]:
        """Return the samples in as few parts of this size as possible, all about as large.

        No part has a single sample, of which batch norm has no statistics, unless the size is one:
        where it is two, one part of an odd number of samples has three.
        """
        samples = len(self.rows)
        parts = -(-samples // size)
        if size > 1:
            parts = max(1, min(parts, samples // 2))
        ends = [samples * part // parts for part in range(parts + 1)]
        return tuple(self._part(start, stop) for start, stop in pairwise(ends))

    def _part(self, start: int, stop: int) -> Micro:
        mixed = self.mixed and self.mixed.taken(lambda tensor: tensor[start:stop])
        tensors = {name: tensor[start:stop] for name, tensor in self.tensors.items()}
        return Micro(self.rows[start:stop], tensors, mixed)

    def to(self, device: torch.device) -> Micro:
        """Return the samples on a device."""
        mixed = self.mixed and self.mixed.taken(lambda tensor: tensor.to(device))
        return Micro(self.rows, {n: t.to(device) for n, t in self.tensors.items()}, mixed)


class Steps(Dataset[tuple[Micro, ...] | CompressorError]):
    """One process's part of each step; ``micro`` samples go through the network at once."""

    def __init__(
        self, data: TrainingData, order: Order, micro: int, rank: int, mixup: Mixup | None = None
    ):
        self._data = data
        self._mixup = mixup
        self._order = order
        self._micro = micro
        self._rank = rank

    def __getitem__(self, step: int) -> tuple[Micro, ...] | CompressorError:
        """Return the parts that a step is done in, or what is wrong with its samples.

        An error raised in a worker process would come back as PyTorch's.
        """
        rows, seed = self._order.part(step, self._rank), (self._order.seed, step, self._rank)
        try:
            batch = self._data.batch(rows, seed)
            tensors = as_tensors(batch, len(rows))
        except CompressorError as error:
            return error
        whole = Micro(rows, tensors)
        if self._mixup is not None:
            whole = Micro(rows, *self._mixup.of(tensors, seed))
        return whole.divided(self._micro)


def as_tensors(batch: Mapping[str, np.ndarray], samples: int) -> dict[str, Tensor]:
    """Return arrays as tensors; text and other objects are left out.

    Raises:
        DataError: an array has another number of samples.
    """
    tensors = {}
    for name, array in batch.items():
        if array.dtype.kind not in "fiub" and array.dtype != bfloat16:
            continue
        if len(array) != samples:
            raise DataError(
                f"training data, array {name!r}",
                f"has {len(array)} samples, and {samples} were asked for",
                "let the transform return as many as it gets",
            )
        tensors[name] = of_numpy(array)
    return tensors


def read_steps(steps: Steps, start: int, stop: int, workers: int) -> Iterator[tuple[Micro, ...]]:
    """Yield the steps from ``start`` on, read ahead by ``workers`` processes.

    Raises:
        DataError: a step's samples cannot be read, or the data cannot be handed to processes.
    """
    if workers:
        try:
            ForkingPickler.dumps(steps)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                "training data",
                f"cannot be handed to {workers} other processes ({error})",
                "define transform and factory at the top of a module (no lambda, no function "
                "inside of another), or set workers: 0",
            ) from error
    loader = DataLoader(
        steps,
        batch_size=None,
        sampler=range(start, stop),
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    for micros in loader:
        if isinstance(micros, CompressorError):
            raise micros
        yield micros


class Objective(Protocol):
    """The loss that training minimizes."""

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return the weighted terms of the loss by name, ``[N]``, one value a sample for each.

        The loss is the mean over the samples of the sum of the terms. Steps count from 0.

        Raises:
            DataError: the target does not fit the outputs.
        """
        ...


class Regulator:
    """Something done at every step beside the gradient step, such as pruning."""

    def before(self, step: int) -> None:
        """Act before a step's forward."""

    def after(self, step: int) -> None:
        """Act once the weights have been moved."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`state_dict` returned."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, what their learning rate is multiplied with, and whether weight decay acts."""

    names: frozenset[str]
    rate: float = 1.0
    decay: bool = False


@dataclass(frozen=True)
class Job:
    """A module and what it is trained for; messages name it after the pass.

    The module takes the model's inputs by name and returns tensors by name, those of the model's
    outputs among them, for the metric. It is trained in place.
    """

    name: str
    module: nn.Module
    objective: Objective
    inputs: Sequence[str]
    outputs: Sequence[str]
    regulators: Sequence[Regulator] = ()
    groups: Sequence[ParameterGroup] = ()

    def handed(self, target: str | None, steps: int) -> Handed:
        """Return all of it as a program needs it that trains in its own loop."""

        def before(step: int) -> None:
            for regulator in self.regulators:
                regulator.before(step)

        def after(step: int) -> None:
            for regulator in self.regulators:
                regulator.after(step)

        def loss(outputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor], step: int) -> Tensor:
            micro = Micro(np.empty(0, np.int64), tensors)  # samples' numbers are the program's own
            terms = self.objective.losses(outputs, micro, step)
            return torch.stack([each.mean() for each in terms.values()]).sum()

        def state() -> dict[str, Tensor]:
            return {
                f"{place}.{name}": tensor
                for place, regulator in enumerate(self.regulators)
                for name, tensor in regulator.state_dict().items()
            }

        def load(saved: dict[str, Tensor]) -> None:
            for place, regulator in enumerate(self.regulators):
                regulator.load_state_dict(below(f"{place}.", saved))

        ends = (before, after, loss, state, load)
        return Handed(self.module, self.inputs, self.outputs, target, steps, *ends)


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    # parameters and buffers of the job's module, by its names, on the CPU
    tensors: Mapping[str, Tensor]
    losses: tuple[float, ...]  # of each step, over all processes
    terms: Mapping[str, float]  # the loss's terms at the last step
    validations: tuple[tuple[int, float], ...]  # step and value of each
    best_step: int  # the number of steps that the tensors have been trained for
    started: int  # the step that this process began with

    def record(self) -> dict[str, Any] | None:
        """Return how the training went, for the report: at most 500 of the losses.

        ``None`` where a program trained in its own loop.
        """
        steps = len(self.losses)
        if not steps:
            return None
        shown = range(0, steps, max(1, -(-steps // _MOST_LOSSES)))
        return {
            "steps": steps,
            "losses": [[step + 1, self.losses[step]] for step in shown],
            "terms": dict(self.terms),
            "validations": [list(entry) for entry in self.validations],
            "best_step": self.best_step,
        }

    def notes(self, metric: Measure | None) -> tuple[str, ...]:
        """Return how the training went, for people."""
        steps = len(self.losses)
        if not steps:
            return ("trained in a loop of the program's own",)
        notes = [f"loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g} over {steps:,} steps"]
        if self.validations:
            name = "loss" if metric is None or metric.against_float else metric.name
            best = dict(self.validations)[self.best_step]
            notes.append(
                f"held-out {name}: {best:.4g} after step {self.best_step:,}, whose weights are "
                f"kept; {self.validations[-1][1]:.4g} at the end"
            )
        notes += [grown] if (grown := growth(self.losses)) else []
        if self.started:
            notes.append(f"resumed from the state saved after step {self.started:,}")
        return tuple(notes)
