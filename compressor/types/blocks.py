"""Calibration block by block: what a pass sees of a model that is too large to observe at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from compressor.types.quantized import WeightCodes


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

    def replace(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        """Say what its parameters are from now on, for the blocks that follow.

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
