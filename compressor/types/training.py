"""What a run provides for a pass that trains."""

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
    """Training samples with random access.

    There is no state: equal arguments give equal batches, in any process and order.
    """

    @property
    def samples(self) -> int:
        """The number of samples."""
        ...

    @property
    def target(self) -> str | None:
        """Name of the array with the right answers, if there is one."""
        ...

    @property
    def random(self) -> bool:
        """Whether the transform draws random numbers, so that samples differ from step to step."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content and of the transform's code."""
        ...

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples in the order of ``rows``, transformed.

        Args:
            rows: the numbers of the samples.
            seed: seed of the transform's random numbers, non-negative integers.

        Raises:
            DataError: the source cannot be read, or the transform fails.
        """
        ...


class Measure(Protocol):
    """The part of a metric that training needs."""

    @property
    def name(self) -> str:
        """Its name in the spec."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        ...

    @property
    def against_float(self) -> bool:
        """Whether the target is the float model's output instead of a label."""
        ...

    @property
    def code(self) -> Callable[..., Any] | None:
        """The user's own function behind it."""
        ...

    @property
    def of_tokens(self) -> bool:
        """Whether tokens that the attention mask leaves out do not count."""
        ...

    def sampled(self, outputs: Batch, samples: int) -> Batch:
        """Return the outputs that it is about, with an axis of samples."""
        ...

    def per_sample(self, outputs: Batch, target: Any, samples: int) -> Array:
        """Return one value a sample, float64 ``[samples]``."""
        ...

    def difference(self, base: Array, candidate: Array) -> Mapping[str, Any]:
        """Compare two models' values for the same samples by the paired test of the gate.

        Returns:
            ``drop``, by how much the candidate is worse, ``ci95``, ``p`` and other keys.
        """
        ...

    def summary(self, values: Array) -> Mapping[str, Any]:
        """Summarise per-sample values as in ``report.json``."""
        ...


class SearchSamples(Protocol):
    """Samples for choosing among models, apart from training and evaluation data."""

    @property
    def target(self) -> str | None:
        """Name of the array with the right answers, if there is one."""
        ...

    def batches(self) -> Iterable[Batch]:
        """Yield all batches, the same at each call."""
        ...


class OpenModel(Protocol):
    """Opens a model other than the run's, such as a teacher, with its weights."""

    def __call__(self, keys: Mapping[str, Any], where: str) -> Carrier:
        """Open a model.

        Args:
            keys: the keys of ``model`` in a spec; inputs default to the run's.
            where: the option that names it, for messages.

        Raises:
            CompressorError: it cannot be opened.
        """
        ...


@dataclass(frozen=True)
class TrainingStep:
    """A finished training step.

    Attributes:
        name: the name of the pass.
        step: the number of finished steps.
        steps: the total number of steps.
        loss: the mean over the step's samples in all processes.
        terms: the weighted terms of the loss by name.
        learning_rate: the learning rate of the step.
        validation: the metric on the held-out samples after the last step of an epoch, or the
            loss if there is no metric; ``None`` after other steps.
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
    """What a pass trains, for a program that trains it in a loop of its own.

    Attributes:
        module: takes the model's inputs by name and returns tensors by name, ``outputs`` among
            them; it is trained in place.
        target: name of the array with the right answers, if there is one.
        steps: the number of steps that the pass would take.
        before: called before a step's forward with the step, from 0.
        after: called with the step after the optimizer has changed the weights.
        loss: computes the loss from outputs, inputs and target by name, and the step.
        state: returns the state of :attr:`before` and :attr:`after`.
        load: restores that state.
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
    """A training loop of a program.

    Attributes:
        digest: hash of its result.
        train: returns the trained parameters and buffers of the module by name.
    """

    digest: str
    train: Callable[[Handed], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Training:
    """What a pass trains with.

    Attributes:
        data: the training data.
        batch: the batch size.
        metric: the spec's metric, if it has one.
        folder: a lasting folder for the state of this training.
        cache: a lasting folder shared by trainings; its files are named by content.
        source: the spec's float model, with its weights.
        open_model: opens a model that an option names.
        samples: the calibration data.
        collect: runs a model that the pass has made over batches and returns the requested
            statistics by ``Request.key``; the run itself collects those of the pass's input.
            Each process observes its share of the batches.
        ranks: the processes that share the training.
        stage: shows a stage with a number of steps, and yields a function that reports progress.
        load_symbol: imports a function that an option names, such as ``pkg.mod:loss``; the second
            argument is the option, for messages.
        note: shows a line that stays.
        search: the spec's search data, if it has any.
        loop: the program's training loop, which replaces the pass's own.
        base: the folder to which paths in options are relative.
        callbacks: functions that are called after each step in the first process.
        label: what tells this training from others in a log; by default, the name of the pass.
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
    label: str = ""
