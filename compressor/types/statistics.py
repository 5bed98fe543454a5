"""Statistics of calibration data: observers, requests for them, and results block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from compressor.errors import DataError
from compressor.types.layers import WeightCodes
from compressor.types.options import Options

StateT = TypeVar("StateT")
ResultT = TypeVar("ResultT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Range:
    """The interval of real values that a quantizer represents, ``low <= 0 <= high``."""

    low: float
    high: float


class Moments:
    """First and second moment of the vectors that a layer multiplies its weights with.

    Args:
        second: ``Σ x xᵀ``, float32 ``[groups, columns, columns]``, or a function that computes it.
        first: ``Σ x``, float32 ``[groups, columns]``.
        rows: the number of vectors.
        vectors: float32 ``[columns, rows]``, or a function that computes them, if they take less
            memory than their second moment.
    """

    def __init__(
        self,
        second: torch.Tensor | Callable[[], torch.Tensor],
        first: torch.Tensor,
        rows: int,
        vectors: torch.Tensor | Callable[[], torch.Tensor] | None = None,
    ):
        self._second = second
        self.first = first
        self.rows = rows
        self._vectors = vectors

    @property
    def second(self) -> torch.Tensor:
        """``Σ x xᵀ``, float32 ``[groups, columns, columns]``; computed when it is first read."""
        if not isinstance(self._second, torch.Tensor):
            self._second = self._second()
        return self._second

    @property
    def vectors(self) -> torch.Tensor | None:
        """Float32 ``[columns, rows]``, if they take less memory than their second moment."""
        held = self._vectors
        return held if held is None or isinstance(held, torch.Tensor) else held()

    def joined(self, other: Moments) -> Moments:
        """Return the moments of these vectors and of others, for a weight that multiplies both.

        Large results are computed when they are read, and are not cached.
        """

        def vectors() -> torch.Tensor:
            both = (self.vectors, other.vectors)
            return torch.cat([each for each in both if each is not None], 1)

        rows = self.rows + other.rows
        few = None not in (self._vectors, other._vectors) and rows <= self.first.shape[1]
        return Moments(
            lambda: copy(self).second + copy(other).second,
            self.first + other.first,
            rows,
            vectors if few else None,
        )

    def divided(self, factors: torch.Tensor) -> Moments:
        """Return the moments of vectors divided by ``factors [groups, columns]``.

        Large results are computed when they are read, and are not cached.
        """

        def second() -> torch.Tensor:
            once = copy(self).second / factors[:, :, None]
            return once.div_(factors[:, None, :])

        def vectors() -> torch.Tensor:
            given = self.vectors
            assert given is not None
            return given / factors[0][:, None]

        first = self.first / factors
        return Moments(second, first, self.rows, None if self._vectors is None else vectors)


@dataclass(frozen=True)
class ChannelGrid:
    """Channels whose values are ``offset + k * step`` for whole ``k`` from 0 to 255.

    Attributes:
        step: one a channel.
        offset: the value at ``k = 0``, one a channel.
    """

    step: tuple[float, ...]
    offset: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class ChannelSpans:
    """The range of each channel of a value; rows are negated minima, and maxima.

    Attributes:
        seen: the extreme values that were observed, float32 ``[2, channels]``.
        reach: the extreme values expected in later samples; at least those observed.
        power: the mean of squares, ``[channels]``.
    """

    seen: torch.Tensor
    reach: torch.Tensor
    power: torch.Tensor

    def divided(self, factors: torch.Tensor) -> ChannelSpans:
        """Return the ranges of the value with its channels divided by ``factors``."""
        return ChannelSpans(
            self.seen / factors, self.reach / factors, self.power / factors.square()
        )


class Observer(Options, ABC, Generic[StateT, ResultT]):
    """A streaming statistic, in memory that does not depend on the number of samples.

    States are values: ``update`` and ``merge`` return a new state and do not modify their
    arguments, so batches may be observed in any grouping or by several processes, and merged.
    """

    name: ClassVar[str]

    @abstractmethod
    def start(self) -> StateT:
        """Return the initial state."""

    @abstractmethod
    def update(self, state: StateT, values: torch.Tensor) -> StateT:
        """Return the state after observing ``values``, a finite tensor of any shape."""

    def absorb(self, state: StateT, values: torch.Tensor) -> StateT:
        """Return the same as :meth:`update`; the given state may be overwritten."""
        return self.update(state, values)

    def share(self, state: StateT) -> float:  # noqa: ARG002
        """Return the observed share of the values that the statistic needs; 1 is enough.

        Shares of merged states add up. An observer that always gains from more values returns 0.
        """
        return 0.0

    @abstractmethod
    def merge(self, first: StateT, second: StateT) -> StateT:
        """Return the state of the stream of ``first`` followed by that of ``second``."""

    @abstractmethod
    def result(self, state: StateT) -> ResultT:
        """Return the statistic; raises ``ValueError`` if nothing was observed."""

    @abstractmethod
    def placeholder(self) -> ResultT:
        """Return a placeholder result of the same form, for planning."""


@dataclass(frozen=True)
class Request:
    """A statistic that a pass needs: an observer of a tensor.

    Attributes:
        tensor: the name of a value in the graph.
        observer: an observer's name in the catalog.
        options: its options, as Python field names.
        where: another value of the same shape; elements count only where it is positive.
    """

    tensor: str
    observer: str
    options: dict[str, Any] = field(default_factory=dict)
    where: str | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """All values that the request reads."""
        return (self.tensor,) if self.where is None else (self.tensor, self.where)

    @property
    def key(self) -> str:
        """A name for the result; equal requests share it."""
        given = ",".join(f"{k}={v}" for k, v in sorted(self.options.items()))
        place = self.tensor if self.where is None else f"{self.tensor}[{self.where}>0]"
        return f"{place}|{self.observer}({given})"


def found_about(
    layer: str, request: Request, statistics: Mapping[str, Any], kind: type[FoundT], otherwise: str
) -> FoundT:
    """Return what calibration found about a layer's input.

    Args:
        layer: the layer's name.
        kind: the type of the result.
        otherwise: what the user can do besides skipping the layer.

    Raises:
        DataError: it found nothing.
    """
    found = statistics.get(request.key)
    if not isinstance(found, kind):
        raise DataError(
            f"layer {layer!r}",
            f"calibration found nothing about its input {request.tensor!r}",
            f"skip the layer, or {otherwise}",
        )
    return found


class Block(Protocol):
    """A part of the model, with statistics of the values in it.

    Its inputs are computed by the blocks before it with the changes of :meth:`replace`.
    """

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that it reads, in order of execution."""
        ...

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Results of the survey's requests for values in it, by ``Request.key``."""
        ...

    def kept(self, make: Callable[[], Any]) -> Any:
        """Return the pass's result for the block, or the stored one of a killed run."""
        ...

    def replace(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        """Replace parameters, for the inputs of the blocks that follow.

        Args:
            changes: codes of a weight or another float tensor, by parameter name.
        """
        ...


class Blocks(Protocol):
    """The blocks of a model in order of execution, to be iterated over once."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def __iter__(self) -> Iterator[Block]:
        """Yield one block at a time; only its activations are in memory."""
        ...
