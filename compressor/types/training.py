"""What a run hands to a pass that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from compressor.progress import Advance as Advance
from compressor.types.carrier import Carrier
from compressor.types.data import Ranks, Samples
from compressor.types.statistics import Request
from compressor.types.tensors import Array, Batch

Rows = NDArray[np.int64]
"""Numbers of samples, from 0."""


class TrainingData(Protocol):
    """Samples that can be had in any order.

    There is no state: equal arguments give equal batches, in whatever process and order.
    """

    @property
    def samples(self) -> int:
        """How many there are."""
        ...

    @property
    def target(self) -> str | None:
        """Name of the array with the right answers, if there is one."""
        ...

    @property
    def random(self) -> bool:
        """The transform draws random numbers, so that a sample is another one at each step."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content and of the code that transforms it."""
        ...

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples in the order of ``rows``, transformed.

        Args:
            rows: which samples.
            seed: of the transform's random numbers, whole numbers from 0.

        Raises:
            DataError: the source cannot be read, or the transform fails.
        """
        ...


class Measure(Protocol):
    """A metric, as far as training needs it."""

    @property
    def name(self) -> str:
        """As in the spec."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Direction."""
        ...

    @property
    def against_float(self) -> bool:
        """The target is the float model's output, not a label."""
        ...

    def per_sample(self, outputs: Batch, target: Any, samples: int) -> Array:
        """Return one value a sample, float64 ``[samples]``."""
        ...

    def difference(self, base: Array, candidate: Array) -> Mapping[str, Any]:
        """Compare two models' values for the same samples by the paired test of the gate.

        Returns:
            ``drop``, how much worse the candidate is; ``ci95`` and ``p`` among its other keys.
        """
        ...

    def summary(self, values: Array) -> Mapping[str, Any]:
        """Summarise per-sample values as in ``report.json``."""
        ...


class SearchSamples(Protocol):
    """Samples to choose on, apart from those that train and those that judge."""

    @property
    def target(self) -> str | None:
        """Name of the array with the right answers, if there is one."""
        ...

    def batches(self) -> Iterable[Batch]:
        """Yield all of them, the same at each call."""
        ...


class OpenModel(Protocol):
    """Opens another model than the run's, such as a teacher, with its weights."""

    def __call__(self, keys: Mapping[str, Any], where: str) -> Carrier:
        """Open it.

        Args:
            keys: as under ``model`` in a spec; inputs default to the run's.
            where: the option, for messages.

        Raises:
            CompressorError: it cannot be opened.
        """
        ...


@dataclass(frozen=True)
class TrainingStep:
    """A step of a training that is done.

    Attributes:
        name: of the pass.
        step: how many steps are done.
        steps: how many there are.
        loss: the mean over the step's samples, in all processes.
        terms: the loss's weighted terms by name.
        learning_rate: what the weights were moved with.
        validation: the metric, or without one the loss, on the held-out samples, where this step
            ends an epoch.
    """

    name: str
    step: int
    steps: int
    loss: float
    terms: Mapping[str, float]
    learning_rate: float
    validation: float | None = None


@dataclass(frozen=True)
class Handed:
    """What a pass trains, handed to a program that trains it in a loop of its own.

    Attributes:
        module: takes the model's inputs by name and returns tensors by name, ``outputs`` among
            them; it is trained in place.
        target: name of the array with the right answers, if there is one.
        steps: how many steps the pass would take.
        before: acts before a step's forward; steps count from 0.
        after: acts once the weights have been moved.
        loss: from outputs, inputs and target by name, and the step to the loss.
        state: returns what :attr:`before` and :attr:`after` remember.
        load: takes what ``state`` returned.
    """

    module: nn.Module
    inputs: Sequence[str]
    outputs: Sequence[str]
    target: str | None
    steps: int
    before: Callable[[int], None]
    after: Callable[[int], None]
    loss: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], int], Tensor]
    state: Callable[[], dict[str, Tensor]]
    load: Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class OwnLoop:
    """A training that a program does itself.

    Attributes:
        digest: hash of what it gives.
        train: returns the trained parameters and buffers of the module, by its names.
    """

    digest: str
    train: Callable[[Handed], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Training:
    """What a pass trains with.

    Attributes:
        data: the training data.
        batch: how many samples the spec takes at once.
        metric: the spec's, if it has one.
        folder: outlives the process; the state of this very training may be kept in it.
        cache: outlives the process and the training; files in it are named by their content.
        source: the spec's float model, with its weights.
        open_model: opens a model that an option names.
        samples: the calibration data.
        collect: runs a model of the pass's own making over batches and returns the requested
            statistics by ``Request.key``; the run itself collects those of the model that the
            pass is given. Each process observes its share of the batches.
        ranks: the processes that share the training.
        stage: shows a stage of so many steps, and yields what tells how many are done.
        load_symbol: finds a function that an option names, such as ``pkg.mod:loss``; the second
            argument is the option, for messages.
        note: shows one line that stays.
        search: the spec's search data, if it has some.
        loop: trains in place of the pass's own loop, if a program does.
        base: the folder that paths in options are relative to.
        callbacks: functions of the program that are told of each step, in the first process.
    """

    data: TrainingData
    batch: int
    metric: Measure | None
    folder: Path
    cache: Path
    source: Carrier
    open_model: OpenModel
    samples: Samples
    collect: Callable[[Carrier, Iterable[Batch], Sequence[Request]], Mapping[str, Any]]
    ranks: Ranks
    stage: Callable[[str, int], AbstractContextManager[Advance]]
    load_symbol: Callable[[str, str], Callable[..., Any]]
    note: Callable[[str], None] = lambda _: None
    search: SearchSamples | None = None
    loop: OwnLoop | None = None
    base: Path = Path()
    callbacks: Sequence[Callable[[TrainingStep], None]] = ()
