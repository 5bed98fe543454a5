"""Data for a pass that runs models of its own making."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from compressor.types.tensors import Batch


class Samples(Protocol):
    """What a pass may run models on: the calibration data, or where there are none, made-up ones.

    The same at each call, so that several models can be compared.
    """

    @property
    def made_up(self) -> bool:
        """There are no calibration data: :meth:`probe` is random and :meth:`batches` is empty."""
        ...

    def probe(self, count: int) -> Batch:
        """Return one batch of about ``count`` samples, as many as the model takes if that is fixed.

        The first calibration samples, or normally distributed floats and integers 0 and 1.
        """
        ...

    def batches(self) -> Iterator[Batch]:
        """Yield the calibration data, batch by batch."""
        ...
