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
        second: ``Σ x xᵀ``, float32 ``[groups, columns, columns]``, or what computes it.
        first: ``Σ x``, float32 ``[groups, columns]``.
        rows: how many vectors were summed.
        vectors: float32 ``[columns, rows]``, or what computes them, if they take less memory than
            their second moment.
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

    def divided(self, factors: torch.Tensor) -> Moments:
        """Return the moments of vectors divided by ``factors [groups, columns]``.

        What takes memory is computed when it is read, and these keep none of it.
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
    """How far each channel of a value reaches; rows are the low ends, sign turned, and the high.

    Attributes:
        seen: the greatest value that was seen, float32 ``[2, channels]``.
        reach: how far later samples are expected to go; not less.
        power: the mean of squares, ``[channels]``.
    """

    seen: torch.Tensor
    reach: torch.Tensor
    power: torch.Tensor

    def divided(self, factors: torch.Tensor) -> ChannelSpans:
        """Return what is known of the value with its channels divided by ``factors``."""
        return ChannelSpans(
            self.seen / factors, self.reach / factors, self.power / factors.square()
        )


class Observer(Options, ABC, Generic[StateT, ResultT]):
    """A statistic gathered in one pass, in memory that does not depend on the number of samples.

    States are values: ``update`` and ``merge`` return a new state and leave their arguments as
    they were, so batches may be observed in any grouping, or on several processes, and merged.
    """

    name: ClassVar[str]

    @abstractmethod
    def start(self) -> StateT:
        """Return the state before any value."""

    @abstractmethod
    def update(self, state: StateT, values: torch.Tensor) -> StateT:
        """Return the state after also seeing ``values`` (a finite tensor of any shape)."""

    def absorb(self, state: StateT, values: torch.Tensor) -> StateT:
        """Return the same as :meth:`update`; the state may be overwritten, for it is given up."""
        return self.update(state, values)

    def share(self, state: StateT) -> float:  # noqa: ARG002
        """Return how much of what it needs has been observed; from 1 on it need not see more.

        Shares of merged states add up. An observer that always gains from more values returns 0.
        """
        return 0.0

    @abstractmethod
    def merge(self, first: StateT, second: StateT) -> StateT:
        """Return the state of the stream of ``first`` followed by that of ``second``."""

    @abstractmethod
    def result(self, state: StateT) -> ResultT:
        """Return the statistic; raises ``ValueError`` where nothing was observed."""

    @abstractmethod
    def placeholder(self) -> ResultT:
        """Return a result of the right form for planning, before any data is seen."""


@dataclass(frozen=True)
class Request:
    """A statistic that a pass needs: which tensor, seen by which observer.

    Attributes:
        tensor: the name of a value in the graph.
        observer: an observer's name in the catalog.
        options: its options, as Python field names.
        where: another value of the same shape; only elements at which it is positive count.
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
    """A part of the model, with statistics of what flows through it.

    The values that enter it come from the blocks before it as they are now: quantized, where
    :meth:`replace` said so.
    """

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that are read in it, in the order of execution."""
        ...

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Results of those of the survey's requests that lie in it, by ``Request.key``."""
        ...

    def kept(self, make: Callable[[], Any]) -> Any:
        """Return what a pass makes of it, or what was made of it by a run that was killed."""
        ...

    def replace(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        """Set what its parameters are from now on, for the blocks that follow.

        Args:
            changes: codes of a weight, or another float tensor, by the parameter's name.
        """
        ...


class Blocks(Protocol):
    """The blocks of a model in the order of execution; each can be seen once."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __iter__(self) -> Iterator[Block]:
        """Yield one block at a time; memory holds the activations of one."""
        ...
