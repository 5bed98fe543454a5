"""The batches of a training, step by step, as a data set that can be read from any step on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from compressor.errors import CompressorError, DataError
from compressor.passes.train.order import Order
from compressor.types.training import Rows, TrainingData


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
