"""The range that keeps the distribution most like itself, as in TensorRT's calibration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from compressor.calibration.clipping import entropy
from compressor.calibration.clipping.mse import expected_error, snap
from compressor.calibration.density import density
from compressor.calibration.histogram import Histogram
from compressor.calibration.observers.ranges import HistogramObserver, Span, within

_WIDENINGS = 16


class Entropy(HistogramObserver):
    """The range of least Kullback-Leibler divergence between the values and what is kept.

    The method of Migacz, "8-bit inference with TensorRT" (GTC 2017), also for ranges that start
    at zero and ranges that are not symmetric; exact zeros are left out, and the divergence is
    corrected for the number of samples. It counts how often values occur and not how large
    they are: a sharp peak makes it clip a long tail although the tail carries the energy (SiLU,
    softmax scores, attention outliers), where 20 dB can be lost against ``min-max``. So
    ``max_loss`` bounds what it may lose; ``inf`` is the method as published.
    """

    name: ClassVar[str] = "entropy"
    max_loss: float = Field(
        default=3.0,
        ge=0,
        allow_inf_nan=True,
        description="widen the range until it loses at most so many dB of signal against min-max",
    )

    def search(self, state: Histogram, full: Span) -> Span:
        """Return the range in units of the bin width."""
        values = density(state)
        search = entropy.search_symmetric if self.symmetric else entropy.search_affine
        low, high = within(search(values, self.bits), full)
        steps = 2**self.bits - (2 if self.symmetric else 1)
        most = 10 ** (self.max_loss / 10) * expected_error(values, snap(full, steps), steps)
        for k in range(_WIDENINGS):
            share = (k / _WIDENINGS) ** 2
            span = low + share * (full[0] - low), high + share * (full[1] - high)
            if span[0] < span[1] and expected_error(values, snap(span, steps), steps) <= most:
                return span
        return full
