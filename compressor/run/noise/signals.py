"""Sums of squares of values in models, and of their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compressor.graph.output_parts import WHOLE, OutputParts, cut_parts
from compressor.types.tensors import Array

_ROUNDING = 1e-12  # of the largest output's power: a few units in float32's last place
_CACHED = 1 << 16  # values whose copies stay in the cache
_ROW = 1 << 12  # float32 values whose squares are summed in float32, to six digits
_MATRIX = 2  # axes
_LEAST = 1e-25  # sum of their squares below which some of these may be less than float32 holds


def signal_and_error(reference: Sequence[Array], other: Sequence[Array]) -> tuple[float, float]:
    """Return the sums of squares of arrays, and of their differences from other arrays."""
    signal = error = 0.0
    for wanted, have in zip(reference, other, strict=True):
        flat, others = wanted.reshape(-1), have.reshape(-1)
        single = flat.dtype == others.dtype == np.float32 and flat.size >= _ROW
        kind = np.float32 if single else np.float64
        for start in range(0, flat.size, _CACHED):
            values = flat[start : start + _CACHED]
            signal += _power(values)
            error += _power(np.subtract(values, others[start : start + _CACHED], dtype=kind))
    return signal, error


def _power(values: Array) -> float:
    """Return the sum of squares of a vector: whole rows in float32, where that is exact enough."""
    whole = values.size // _ROW * _ROW if values.dtype == np.float32 else 0
    rows = values[:whole].reshape(-1, _ROW)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
    if whole and not _LEAST < total < math.inf:
        whole, total = 0, 0.0
    exact = values[whole:].astype(np.float64)
    return total + float(np.vecdot(exact, exact))


def same_rows(wanted: Array, have: Array, samples: int) -> Array:
    """Return a value with its rows in the order of those of another model's.

    What computes row by row takes those of ``[samples * tokens, channels]`` in any order, and
    ``fuse`` may put samples first where tokens were, or the other way round. No name says so: of
    both orders and that which is there, the nearest is right.
    """
    rows = len(have) if have.ndim == _MATRIX else 0
    if have.shape != wanted.shape or not rows or rows % samples or samples in (1, rows):
        return have
    apart = [(samples, -1, have.shape[1]), (-1, samples, have.shape[1])]
    orders = [have, *(have.reshape(a).swapaxes(0, 1).reshape(have.shape) for a in apart)]
    with np.errstate(invalid="ignore"):
        return min(orders, key=lambda order: signal_and_error([wanted], [order])[1])


def ratio_db(signal: float, error: float) -> float | None:
    """Return ``10 log10(signal / error)``; ``None`` where there is no error or no signal."""
    if error <= 0.0 or signal <= 0.0:
        return None
    return 10.0 * math.log10(signal / error)


@dataclass
class SignalSums:
    """Sums of squares of a value and of its error, which grow portion by portion.

    Attributes:
        comparable: the value had the same shape in both models, and was finite in the float one.
        finite: it was finite in the other one, too.
    """

    signal: float = 0.0
    error: float = 0.0
    comparable: bool = True
    finite: bool = True

    def add(self, want: Array, have: Array) -> None:
        """Add the squares of some more samples."""
        if want.shape != have.shape:
            self.comparable = False
            return
        with np.errstate(invalid="ignore"):
            signal, error = signal_and_error([want], [have])
        # Sums of finite values are finite, and most values are.
        if not math.isfinite(signal) and not np.isfinite(want).all():
            self.comparable = False
        elif not math.isfinite(error) and not np.isfinite(have).all():
            self.finite = False
        else:
            self.signal, self.error = self.signal + signal, self.error + error

    @property
    def ratio(self) -> float | None:
        """Error over signal; ``None`` if it is not known."""
        known = self.comparable and self.finite and self.signal > 0
        return self.error / self.signal if known else None


class OutputSums:
    """Sums of a model's outputs and of their errors, which grow batch by batch.

    All outputs count alike, and so do the parts that an output is joined of: one of hundreds of
    pixels would hide the error of one of probabilities. What is zero but for rounding beside the
    largest does not count, and whole numbers only where there is nothing else.

    Args:
        parts: what each output is joined of, in their order; empty where outputs count as a whole.
            One without a part says nothing of a sample, and counts only where it has an error.
    """

    def __init__(self, parts: OutputParts = ()):
        self._parts = [cuts or WHOLE for cuts in parts]
        self._telling = [bool(cuts) for cuts in parts for _ in cuts or WHOLE]
        self._sums: list[SignalSums] = []
        self._sizes: list[int] = []
        self._totals: list[float] = []
        self._floats: list[bool] = []

    def add(self, reference: Sequence[Array], other: Sequence[Array]) -> None:
        """Add outputs of a batch, in their order, and those to compare them with."""
        reference, other = (cut_parts(each, self._parts) for each in (reference, other))
        if not self._sums:
            self._sums = [SignalSums() for _ in reference]
            self._sizes = [0] * len(reference)
            self._totals = [0.0] * len(reference)
            self._floats = [array.dtype.kind == "f" for array in reference]
        pairs = zip(reference, other, strict=True)
        for place, (want, have) in enumerate(pairs):
            self._sums[place].add(want, have)
            self._sizes[place] += want.size
            self._totals[place] += float(want.sum(dtype=np.float64))

    @property
    def spread_db(self) -> list[float | None]:
        """Variance of all values of each output over its mean squared error, in dB.

        ``None`` where there is no error, no variance or nothing to compare.
        """
        found: list[float | None] = []
        place = 0
        for count in map(len, self._parts) if self._parts else [1] * len(self._sums):
            sums, here = self._sums[place : place + count], slice(place, place + count)
            mean_square = sum(self._totals[here]) ** 2 / max(sum(self._sizes[here]), 1)
            spread, error = sum(s.signal for s in sums) - mean_square, sum(s.error for s in sums)
            known = all(s.comparable and s.finite for s in sums)
            found.append(ratio_db(spread, error) if known else None)
            place += count
        return found

    @property
    def weights(self) -> Array:
        """What a squared error of each part counts, ``[parts]``: a share of one over its signal."""
        signals = np.array([sums.signal for sums in self._sums])
        powers = signals / np.maximum(self._sizes, 1)
        powers = np.where(self._floats, powers, 0.0) if any(self._floats) else powers
        counted = powers > _ROUNDING * powers.max(initial=0.0)
        if self._telling:
            counted &= np.logical_or(self._telling, [sums.error > 0 for sums in self._sums])
        ones = np.divide(1.0, signals, out=np.zeros(len(signals)), where=counted)
        return np.asarray(ones / max(int(counted.sum()), 1))

    @property
    def ratio(self) -> float | None:
        """Error over signal, the mean of the parts that count; ``None`` where it is not known."""
        if not self._sums or not all(sums.comparable and sums.finite for sums in self._sums):
            return None
        weights = self.weights
        errors = np.array([sums.error for sums in self._sums])
        return float(weights @ errors) if weights.any() else None

    @property
    def sqnr_db(self) -> float | None:
        """The same in dB of signal over error; ``None`` where there is no error or no signal."""
        ratio = self.ratio
        return None if ratio is None else ratio_db(1.0, ratio)
