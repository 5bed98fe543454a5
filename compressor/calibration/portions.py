"""Run batches in portions of samples, so that memory holds the inner values of a few samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from compressor.graph.values import all_nodes, computes_scale, static_shape, value_by_name
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import Batch, cut, samples_in

MOST = 128 << 20
"""Bytes of inner values that a portion has at most, unless a single sample has more."""

_TOGETHER = 8
"""How many times as many where one scale for a whole batch depends on which samples are in it."""

# ONNX Runtime multiplies a single row by other code, which rounds otherwise. So portions have a
# single sample only if two take too much memory.
_PAIR = 2


class Portion(NamedTuple):
    """Some samples of a batch, with a model's values for them.

    Attributes:
        start: how many samples of the batch came before.
        values: of each model. Those that do not depend on the batch come with the first portion
            alone.
        last: the batch ends with it.
    """

    start: int
    batch: Batch
    values: tuple[Batch, ...]
    last: bool

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return samples_in(self.batch)


class Portions:
    """Runs batches in portions, whose size follows from what one sample takes.

    A batch stays whole if it fits, or if its size is fixed. One with a scale for all of its samples
    is divided only where it takes far more memory: a scale of some samples is another one.

    Args:
        run: runs a portion; returns the values of one model, or of several.
        models: the models that it runs.
    """

    def __init__(
        self,
        run: Callable[[Batch], tuple[Batch, ...]],
        models: Sequence[Carrier],
        most: int = MOST,
    ):
        self._run = run
        self._models = models
        scaled = any(_scales(model) for model in models)
        self._most = most * _TOGETHER if scaled else most
        self._size: int | None = None if all(_divides(model) for model in models) else 0
        self._constant: frozenset[str] = frozenset()

    def of_all(self, batches: Iterable[Batch]) -> Iterator[Portion]:
        """Yield the portions of several batches."""
        for batch in batches:
            yield from self.of(batch)

    def of(self, batch: Batch) -> Iterator[Portion]:
        """Yield a batch's portions, in the order of their samples."""
        count = samples_in(batch)
        start = 0
        if self._size is None and count > _PAIR:
            values = self._run(cut(batch, 0, 1))
            self._learn(values)
            del values
        while start < count:
            size = min(self._size or count, count - start)
            if size > 1 and count - start - size == 1:
                size += 1
            part = cut(batch, start, start + size) if size < count else batch
            values = self._run(part)
            if start:
                values = tuple(
                    {n: v for n, v in given.items() if n not in self._constant} for given in values
                )
            yield Portion(start, part, values, start + size == count)
            del values
            start += size

    def constant(self, name: str) -> bool:
        """Whether a value of the last batch is the same in each portion."""
        return name in self._constant

    def _learn(self, values: tuple[Batch, ...]) -> None:
        """Find the size of a portion, and which values are the same in each, from one sample's."""
        shapes = {name: array.shape for given in values for name, array in given.items()}
        self._constant = frozenset(
            name
            for model in self._models
            for name, value in value_by_name(model.graph()).items()
            if name in shapes and static_shape(value) == shapes[name]
        )
        held = sum(
            array.nbytes * (1 if name in self._constant else _PAIR)
            for given in values
            for name, array in given.items()
        )
        self._size = max(1, int(self._most * _PAIR / max(held, 1)))


def _divides(model: Carrier) -> bool:
    """Whether a model runs on batches of any size."""
    axes = {spec.shape[0] if spec.shape else None for spec in model.inputs}
    one = len(axes) == 1 and isinstance(axes.pop(), str)
    return one and Capability.GRAPH in model.offers


def _scales(model: Carrier) -> bool:
    """Whether a model computes scales for whole batches."""
    return Capability.GRAPH in model.offers and any(
        computes_scale(node) for node in all_nodes(model.graph().graph)
    )
