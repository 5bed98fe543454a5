"""Calibration samples that training reads repeatedly, in groups of a step's size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from compressor.graph.values import tensor_spec
from compressor.run.blocks.blockwise import Activations
from compressor.types.data import Samples
from compressor.types.tensors import cut, fixed_batch, samples_in

_HELD_BACK = 8  # one of so many groups of samples judges, and nothing is trained with it


class Groups:
    """Batches in groups for steps of training, and those that judge.

    Args:
        limit: samples in a step.
        seed: of the order in which they are drawn.
    """

    def __init__(self, limit: int, seed: int):
        self._limit = self._size = limit
        self._order = np.random.default_rng(seed)
        self._groups: list[list[int]] = []  # the batches of a step
        self._count = 0

    def add(self, samples: int) -> None:
        """Add the next batch, of so many samples."""
        if self._size >= self._limit:
            self._groups.append([])
            self._size = 0
        self._groups[-1].append(self._count)
        self._size += samples
        self._count += 1

    @property
    def held_out(self) -> list[int]:
        """The batches that judge."""
        return [index for group in self._judging for index in group]

    def drawn(self) -> Iterator[Sequence[int]]:
        """Yield the batches of a step in random order of the groups, again and again."""
        judging = self._judging
        groups = [group for group in self._groups if group not in judging] or judging
        while True:
            for place in self._order.permutation(len(groups)):
                yield groups[place]

    @property
    def _judging(self) -> list[list[int]]:
        return self._groups[::_HELD_BACK]


class KeptSamples(Groups):
    """Groups of batches whose values are kept.

    Args:
        store: keeps the values of the batches.
        limit: as above.
        seed: as above.
    """

    def __init__(self, store: Activations, limit: int, seed: int):
        super().__init__(limit, seed)
        self._store = store

    def read(self, model: ir.Model, samples: Samples, names: Collection[str]) -> None:
        """Keep some inputs of a model, in batches of a step's size at most."""
        wanted = sorted(names)
        most = fixed_batch([tensor_spec(value) for value in model.graph.inputs]) or self._limit
        for whole in samples.batches():
            for start in range(0, samples_in(whole), most):
                batch = cut(whole, start, start + most)
                for name in wanted:
                    self._store.append(name, np.asarray(batch[name]))
                self.add(samples_in(batch))
