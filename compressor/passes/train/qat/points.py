"""Where a network is quantized while it is trained, and with which scales that begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from compressor import catalog
from compressor.errors import SpecError
from compressor.graph.values import value_by_name
from compressor.models.executor import from_numpy
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters
from compressor.passes.quantize.static.settings import ActivationCode, StaticSettings
from compressor.passes.quantize.static.writing import input_sources, own_bias
from compressor.passes.train.qat.networks import Networks
from compressor.types.layers import Layer
from compressor.types.quantized import Scheme
from compressor.types.statistics import ChannelGrid, Observer, Request

_LEAST_SHARE = 1e-4  # of a layer's largest scale: what a dead channel's scale is at least
_BYTE = 8


@dataclass(frozen=True)
class WeightPoint:
    """A weight that is quantized.

    Attributes:
        layer: in the graph that is trained.
        scheme: what its codes mean.
        scale: at the beginning, ``[rows, 1]`` or ``[1, 1]``, of the weight as it will be stored.
        zero_point: likewise.
        grid: the levels of the input's channels, which are folded into the layer, where the
            input's codes are pixels.
        norm: name of the batch norm that is folded into it at the end.
        source: the activation that the layer reads; ``None`` where there is a ``grid``.
        integer_bias: the layer will have a bias, stored as integers at the scale of the product.
    """

    layer: Layer
    scheme: Scheme
    scale: Tensor
    zero_point: Tensor
    grid: ChannelGrid | None = None
    norm: str | None = None
    source: str | None = None
    integer_bias: bool = False

    @property
    def scales_folded(self) -> bool:
        """Scales are trained without the factors of the batch norm, which they take over later.

        Rows that have a scale each are rounded to the same codes before and after a factor goes
        into both. So the running variances, which move while norms are live, move no range.
        """
        return self.norm is not None and self.scheme.granularity == "channel"

    def column_factors(self) -> Tensor | None:
        """Return what is folded into each column of the weight in canonical form."""
        if self.grid is None:
            return None
        steps = torch.tensor(self.grid.step, dtype=torch.float64)
        return steps.repeat_interleave(self.layer.columns // len(steps))


@dataclass(frozen=True)
class ActivationPoint:
    """An activation that is quantized.

    Attributes:
        value: its name.
        scale: at the beginning.
        zero_point: likewise.
        bits: width of a code.
        low: smallest code.
        high: largest code.
        symmetric: the zero point stays 0.
        exact: its codes are the pixels of images already, so that nothing is to be learned.
    """

    value: str
    scale: float
    zero_point: int
    bits: int
    low: int
    high: int
    symmetric: bool = False
    exact: bool = False

    @property
    def movable(self) -> bool:
        """The zero point may be another, and lies inside the range, not at an end of it."""
        return not self.symmetric and self.low < self.zero_point < self.high


@dataclass(frozen=True)
class Points:
    """Everything that is quantized.

    Attributes:
        weights: by the layer's name.
        activations: by the value's name.
        reasons: why other layers are not.
    """

    weights: Mapping[str, WeightPoint]
    activations: Mapping[str, ActivationPoint]
    reasons: Mapping[str, str]


def find_points(
    networks: Networks,
    settings: StaticSettings,
    statistics: Mapping[str, Any],
    span: Literal["min-max", "mse"],
) -> Points:
    """Return where to quantize, with ranges from calibration and scales from the weights.

    Args:
        networks: with their weights.
        settings: what to quantize, and how.
        statistics: the answers to the requests of the decision about the fused graph.
        span: how weights' scales are found.

    Raises:
        SpecError: batch norms are to stay, and a value of the fused graph exists without them not.
    """
    changed = settings.decide(networks.folded.clone())
    schemes, grids = changed.schemes, changed.pixel_grids(statistics)
    changed, known = changed.with_pixels(statistics, {})
    placement, codes = changed.placement, changed.codes(known, statistics)
    present = value_by_name(networks.trained)
    activations = {}
    for name in placement.values:
        if name in present:
            scheme = settings.activation_scheme(changed.value_bits(name))
            activations[name] = _activation(name, codes[name], scheme, exact=name in known)
        elif name not in known:
            raise SpecError(
                f"activation {name!r}",
                "exists only once batch norms are folded",
                "set batch-norm: folded",
            )
    find = mse_parameters if span == "mse" else absmax_parameters
    trained, sources = networks.layers(), input_sources(changed.model, placement)
    weights: dict[str, WeightPoint] = {}
    for layer, value in placement.layers:
        if layer.name in weights:
            continue
        tensor = changed.model.graph.initializers[layer.weight].const_value
        assert tensor is not None
        matrix = layer.canonical(from_numpy(tensor)).to(torch.float32)
        scale, zero = find(matrix, schemes[layer.name])
        bias = own_bias(changed.nodes[layer.name]) if settings.profile.integer_bias else None
        weights[layer.name] = WeightPoint(
            layer=trained[layer.name],
            scheme=schemes[layer.name],
            scale=torch.maximum(scale, scale.max() * _LEAST_SHARE),
            zero_point=zero,
            grid=grids.get(layer.name),
            norm=networks.norms.get(layer.name),
            source=None if layer.name in grids else sources[value].name,
            integer_bias=bias is not None,
        )
    return Points(weights, activations, changed.reasons)


def _activation(name: str, code: ActivationCode, scheme: Scheme, *, exact: bool) -> ActivationPoint:
    if scheme.bits == _BYTE and scheme.signed:
        scheme = replace(scheme, narrow=False)  # bytes saturate at -128, nothing clips before
    return ActivationPoint(
        value=name,
        scale=code.scale,
        zero_point=code.zero_point,
        bits=scheme.bits,
        low=scheme.low,
        high=scheme.high,
        symmetric=scheme.symmetric,
        exact=exact,
    )


def placeholders(requests: Sequence[Request]) -> Mapping[str, Any]:
    """Return statistics of the right form, for planning."""
    return {r.key: _observer(r.observer, r.options).placeholder() for r in requests}


def _observer(name: str, options: Mapping[str, Any]) -> Observer[Any, Any]:
    found: Observer[Any, Any] = catalog.load("observer", name)(**options)
    return found
