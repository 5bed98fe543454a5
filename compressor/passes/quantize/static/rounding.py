"""Rounds the weights of a model by the second moments of what they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.models.resident_memory import return_freed_memory
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.maths.descent import better_rows
from compressor.passes.quantize.maths.gptq import FactoredMoment, gptq, gptq_weights
from compressor.passes.quantize.maths.gptq_vectors import gptq_from_vectors
from compressor.passes.quantize.maths.grids import kept_grids
from compressor.passes.quantize.maths.pairs import paired_scale, without_overflow
from compressor.passes.quantize.static.writing import LeastScale, widened
from compressor.types.layers import Layer, QuantizedTensor, Scheme, sqnr_db
from compressor.types.parallel import in_threads
from compressor.types.statistics import Moments

_BYTE = 8
# How many times as many columns as vectors a layer has from which on a matrix of vectors, which
# changes with each block of columns, costs less than to factorize one of columns.
_WIDE = 1.5
_ROOM = 256 << 20  # bytes that weights take which are rounded at once
_OF_WEIGHT, _OF_MOMENT = 50, 12  # bytes that rounding takes for an element of each


@dataclass(frozen=True)
class FloatWeight:
    """A weight that is to be rounded, in canonical form.

    Attributes:
        read: returns it, float32 ``[rows, columns]``.
        codes: rounds it, once.
        moments: of what it multiplies, where codes depend on them.
    """

    layer: Layer
    read: Callable[[], Tensor]
    codes: Callable[[], QuantizedTensor]
    moments: Moments | None = None


class RoundedWeight(NamedTuple):
    """A layer's name, its codes, and their signal-to-noise ratio in dB."""

    layer: str
    codes: QuantizedTensor
    sqnr: float | None


def round_weights(weights: Iterable[FloatWeight]) -> Iterator[RoundedWeight]:
    """Round weights on as many threads as torch would use; yield them in their order."""
    # Neighbours that read the same values are rounded by the same factors.
    together = groupby(weights, key=lambda weight: id(weight.moments or weight))
    jobs = [list(neighbours) for _, neighbours in together]
    for rounded in in_threads(_rounded, jobs, _taken, _ROOM):
        yield from rounded


def _rounded(weights: Sequence[FloatWeight]) -> list[RoundedWeight]:
    found = []
    if _taken(weights) > _ROOM // 4:
        return_freed_memory()  # each thread keeps what it frees, for itself
    for weight in weights:
        codes = weight.codes()
        sqnr = sqnr_db(weight.read(), codes.dequantize())
        found.append(RoundedWeight(weight.layer.name, codes, sqnr))
    return found


def _taken(weights: Sequence[FloatWeight]) -> int:
    """Return the bytes that it takes to round weights, one after the other."""
    most = max(weight.layer.rows * weight.layer.columns for weight in weights)
    first = weights[0]
    vectors = 0 if first.moments is None else min(first.moments.rows, first.layer.columns)
    return _OF_WEIGHT * most + _OF_MOMENT * vectors * first.layer.columns


class Rounding(local):
    """Rounds one weight after the other, in each thread those that it is given.

    The factors of a second moment are kept for the next weight: queries, keys and values read the
    same.

    Args:
        search: how ranges are found: ``min-max``, ``mse`` or ``output-error``; ``None`` for the
            first at 8 bits and the last below.
    """

    def __init__(self, search: str | None):
        self._search = search
        self._moments: Moments | None = None
        self._factored: list[FactoredMoment] = []

    def quantized(
        self,
        read: Callable[[], Tensor],
        scheme: Scheme,
        moments: Moments | None,
        least: LeastScale = None,
    ) -> QuantizedTensor:
        """Quantize a weight, to nearest where there are no moments.

        Args:
            read: returns the weight, float32 ``[rows, columns]``.
            scheme: its bits and granularity.
            moments: of what it multiplies.
            least: returns the least scale that each row may have.
        """
        if moments is not self._moments:  # their memory goes before the weight comes
            self._moments, self._factored = None, []
        matrix = read()
        search = self._search or ("min-max" if scheme.bits == _BYTE else "output-error")
        find = absmax_parameters if search == "min-max" else mse_parameters
        scale, zero = find(matrix, scheme)
        scale = paired_scale(matrix, kept_grids(matrix, scale, scheme), scheme)
        shared = scale.shape[0] == 1
        if search == "output-error" and moments is not None and not shared and _whole(moments):
            fitted = gptq_weights(matrix, moments.second[0], scheme)
            kept = quantize(matrix, scale, zero, scheme)
            better = better_rows(matrix, moments.second[0], fitted, kept)
            return widened(without_overflow(better), least)
        if least is not None:
            needed = least()
            scale = torch.maximum(scale, needed.amax(0, keepdim=True) if shared else needed)
        if moments is None:
            return quantize(matrix, scale, zero, scheme)
        vectors = moments.vectors
        if vectors is not None and len(vectors) > _WIDE * vectors.shape[1]:
            return gptq_from_vectors(matrix, vectors, scale, zero, scheme)
        # The rows of each channel group are rounded by the moment of that group's inputs.
        factored = self._factors(moments)
        rows = matrix.shape[0] // len(factored)
        codes = []
        for index, moment in enumerate(factored):
            group = slice(index * rows, (index + 1) * rows)
            part = slice(None) if shared else group
            codes.append(gptq(matrix[group], moment, scale[part], zero[part], scheme).codes)
        return QuantizedTensor(torch.cat(codes), scale, zero, scheme)

    def _factors(self, moments: Moments) -> list[FactoredMoment]:
        """Return the moment of each channel group with its factor."""
        if not self._factored:
            second = copy(moments).second  # of a copy, so that it goes: vectors may take less
            self._factored = [FactoredMoment.of(moment) for moment in second]
            self._moments = moments
        return self._factored


def _whole(moments: Moments) -> bool:
    """Whether all rows read the same inputs, whose second moment is known."""
    return moments.vectors is None and len(moments.second) == 1
