"""Quantize one layer's weight with what calibration found about the layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from compressor.passes.quantize.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.gptq import gptq
from compressor.passes.quantize.static_options import WeightOptions
from compressor.types.layers import Layer
from compressor.types.quantized import QuantizedTensor, Scheme
from compressor.types.statistics import Moments


@dataclass(frozen=True)
class WeightJob:
    """A weight that is to be quantized.

    Attributes:
        layer: whose weight it is.
        scheme: how its codes are represented.
        read: returns the float weight in its stored shape.
        moments: of the layer's inputs; ``None`` rounds to nearest.
        least_scale: returns the least scale of each row that the bias allows, ``[rows, 1]``;
            ``None`` if it allows any.
    """

    layer: Layer
    scheme: Scheme
    read: Callable[[], torch.Tensor]
    moments: Moments | None = None
    least_scale: Callable[[], torch.Tensor] | None = None

    def matrix(self) -> torch.Tensor:
        """The float weight in canonical form, float32 ``[rows, columns]``."""
        return self.layer.canonical(self.read()).to(torch.float32)

    def maker(self, options: WeightOptions) -> Callable[[], QuantizedTensor]:
        """Return a function that quantizes the weight, once, when it is first called."""

        @cache
        def make() -> QuantizedTensor:
            matrix = self.matrix()
            find = mse_parameters if options.range == "mse" else absmax_parameters
            scale, zero = find(matrix, self.scheme)
            if self.least_scale is not None:
                least = self.least_scale()
                least = least.amax(0, keepdim=True) if scale.shape[0] == 1 else least
                scale = torch.maximum(scale, least)
            if self.moments is None:
                return quantize(matrix, scale, zero, self.scheme)
            return _rounded(matrix, self.moments.second, scale, zero, self.scheme)

        return make


def _rounded(
    matrix: torch.Tensor,
    moment: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: Scheme,
) -> QuantizedTensor:
    """Round with GPTQ, the rows of each channel group by the moment of the group's inputs."""
    groups = moment.shape[0]
    rows = matrix.shape[0] // groups
    shared = scale.shape[0] == 1
    codes = []
    for index in range(groups):
        own = slice(index * rows, (index + 1) * rows)
        part = slice(None) if shared else own
        codes.append(gptq(matrix[own], moment[index], scale[part], zero[part], scheme).codes)
    return QuantizedTensor(torch.cat(codes), scale, zero, scheme)
