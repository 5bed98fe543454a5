"""Quantize one layer's weight with what calibration found about the layer's input."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.graph.layers import layers_with_nodes, moment_request
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.maths.gptq import gptq
from compressor.passes.quantize.static.graph import LeastScale, StaticCodes, write_static_codes
from compressor.passes.quantize.static.placement import Placement, place, profile_for
from compressor.passes.quantize.static.settings import (
    ALREADY,
    ActivationOptions,
    StaticRule,
    StaticSettings,
    WeightOptions,
    kernel_notes,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer
from compressor.types.matrices import sqnr_db
from compressor.types.passes import (
    GraphPass,
    LayerOutcome,
    LayerPlan,
    Outcome,
    PassContext,
    Survey,
)
from compressor.types.quantized import QuantizedTensor, Scheme
from compressor.types.statistics import Moments, Request


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


_Pair: TypeAlias = tuple[Callable[[], torch.Tensor], Callable[[], QuantizedTensor]]
_MOST_COLUMNS = 5000  # a second moment of more columns takes over 100 MB
_NOTHING_LEFT = "nothing to quantize: all layers that have integer kernels are quantized already"


class QuantizeStatic(GraphPass):
    """Quantize weights and activations to integers with ranges from calibration data.

    QuantizeLinear and DequantizeLinear are put where the exports' target fuses them into integer
    kernels; weights are stored as integer codes. Activation ranges come from observers, weights
    are rounded so that the layer's output changes least.
    """

    name: ClassVar[str] = "quantize-static"
    version: ClassVar[int] = 2
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH, Capability.RUN})
    source: ClassVar[str] = (
        "Jacob et al. 2017 (arXiv:1712.05877) sections 2 and 3; "
        "Frantar et al. 2022 (arXiv:2210.17323) for rounding"
    )

    weights: WeightOptions = Field(default_factory=WeightOptions, description="weights")
    activations: ActivationOptions = Field(
        default_factory=ActivationOptions, description="activations"
    )
    layers: tuple[StaticRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers, and ask for ranges and second moments."""
        settings = self._settings(context)
        settings.check()
        model = carrier.graph()
        schemes, reasons = settings.schemes(carrier.layers(), model)
        placement = place(model, settings.profile, schemes)
        placed = {layer.name for layer, _ in placement.layers}
        kept = {
            layer.name: ""
            if layer.name in placed
            else reasons.get(layer.name, "it reads no float value of the main graph")
            for layer in carrier.layers()
        }
        if not placed and ALREADY in kept.values():
            rows = tuple(LayerPlan(name, "keep", why, touched=False) for name, why in kept.items())
            return Survey(rows, notes=(_NOTHING_LEFT,))
        actions = {
            name: f"{scheme} x {settings.activation_type(name)}" for name, scheme in schemes.items()
        }
        rows = plan_layers(self.name, actions, kept)
        requests = self._moment_requests(model, placement)
        requests.update({r.key: r for r in settings.requests(model, placement)})
        return Survey(rows, tuple(requests.values()), kernel_notes(context.targets, settings))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        graph, weights = self._quantized(carrier, context, statistics)
        outcomes = []
        for layer in carrier.layers():
            if layer.name in weights:
                before, quantized = weights[layer.name]
                after = quantized()
                loss = sqnr_db(before(), after.dequantize())
                outcomes.append(LayerOutcome(layer.name, str(after.scheme), loss))
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier, context, statistics)[0])

    def _settings(self, context: PassContext) -> StaticSettings:
        return StaticSettings(
            profile_for(context.targets), self.weights, self.activations, self.layers
        )

    def _quantized(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> tuple[ir.Model, dict[str, _Pair]]:
        """Return the quantized graph, and each weight before and after, computed when asked."""
        model = carrier.graph().clone()
        settings = self._settings(context)
        schemes, _ = settings.schemes(carrier.layers(), model)
        moments = self._moments(model, schemes, statistics)
        known = settings.pixel_codes(model, schemes, statistics, moments)
        placement = place(model, settings.profile, schemes)
        codes = StaticCodes(placement, schemes, settings.codes(placement, known, statistics))
        jobs: dict[str, WeightJob] = {}

        def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
            read = _reader(model.graph.initializers[layer.weight])
            job = WeightJob(layer, schemes[layer.name], read, moments.get(layer.name), least)
            jobs[layer.name] = job
            return job.maker(self.weights)

        makers = write_static_codes(model, settings.profile, codes, make_codes)
        return model, {name: (job.matrix, makers[name]) for name, job in jobs.items()}

    def _moments(
        self, model: ir.Model, chosen: Collection[str], statistics: Mapping[str, Any]
    ) -> dict[str, Moments]:
        """Return the moments of the chosen layers' inputs, where they were asked for."""
        found: dict[str, Moments] = {}
        for layer, node in layers_with_nodes(model):
            request = self._moment_request(layer, node) if layer.name in chosen else None
            moments = None if request is None else statistics.get(request.key)
            if moments is not None:
                found.setdefault(layer.name, moments)
        return found

    def _moment_requests(self, model: ir.Model, placement: Placement) -> dict[str, Request]:
        nodes = {layer.name: node for layer, node in layers_with_nodes(model)}
        asked = (self._moment_request(layer, nodes[layer.name]) for layer, _ in placement.layers)
        return {request.key: request for request in asked if request is not None}

    def _moment_request(self, layer: Layer, node: ir.Node) -> Request | None:
        if self.weights.rounding != "gptq" or layer.columns > _MOST_COLUMNS:
            return None
        return moment_request(layer, node)


def _reader(value: ir.Value) -> Callable[[], torch.Tensor]:
    """Return a function that reads an initializer as it is now, whatever becomes of the value."""
    tensor = value.const_value
    assert tensor is not None
    return lambda: torch.from_numpy(np.array(tensor.numpy()))
