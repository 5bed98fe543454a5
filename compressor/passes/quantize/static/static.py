"""``quantize-static``: integer weights and activations, with ranges from calibration data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.graph.codes import attach_codes
from compressor.graph.editing import Editor
from compressor.graph.layers import moment_request
from compressor.graph.stored_weights import is_quantized
from compressor.models.layer_uses import computed_weights
from compressor.passes.quantize.cast.rewrite import in_single
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters, quantize
from compressor.passes.quantize.maths.gptq import gptq
from compressor.passes.quantize.maths.gptq_vectors import gptq_from_vectors
from compressor.passes.quantize.maths.grids import kept_grids
from compressor.passes.quantize.static.options import ActivationOptions, StaticRule, WeightOptions
from compressor.passes.quantize.static.placement import profile_for
from compressor.passes.quantize.static.settings import Decision, StaticSettings, kernel_notes
from compressor.passes.quantize.static.writing import LeastScale, write_static_codes
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer, QuantizedTensor, Scheme, sqnr_db
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey
from compressor.types.statistics import Moments, Request

_Pair: TypeAlias = tuple[Callable[[], torch.Tensor], Callable[[], QuantizedTensor]]
_MOST_COLUMNS = 5000  # a second moment of more columns takes over 100 MB
# How many times as many columns as vectors a layer has from which on a matrix of vectors, which
# changes with each block of columns, costs less than to factorize one of columns.
_WIDE = 1.5


class QuantizeStatic(GraphPass):
    """Quantize weights and activations to integers with ranges from calibration data.

    QuantizeLinear and DequantizeLinear are put where the exports' target fuses them into integer
    kernels; weights are stored as integer codes. Activation ranges come from observers, weights
    are rounded so that the layer's output changes least. Large tables of embeddings, and weights of
    recurrent layers and in branches and bodies, are stored as codes and computed with as floats.
    """

    name: ClassVar[str] = "quantize-static"
    version: ClassVar[int] = 5
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
        default=(),
        description="rules for single layers; the first that matches wins. A layer with a rule is "
        "quantized even if it is predicted to be faster as floats",
    )

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model with what it computes in half precision in float32."""
        return in_single(carrier)

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers, and ask for ranges and second moments."""
        settings = self._settings(context)
        settings.check()
        decision = settings.decide(carrier.graph())
        stored = decision.stored
        kept = {
            layer.name: "" if layer.name in stored else decision.reasons.get(layer.name, "")
            for layer in decision.layers
        }
        actions = {
            name: f"{scheme} x {decision.settings.activation_type(name)}"
            for name, scheme in decision.schemes.items()
        } | {name: str(scheme) for name, scheme in stored.items()}
        planned = plan_layers(self.name, actions, kept, quantized=is_quantized(carrier.graph()))
        rows = tuple(
            replace(row, reason=decision.reasons[row.name]) if row.name in decision.faster else row
            for row in planned
        )
        nodes = decision.nodes
        moments = [self._moment_request(x, nodes[x.name]) for x, _ in decision.placement.layers]
        asked = [*(request for request in moments if request is not None), *decision.requests()]
        requests = tuple({request.key: request for request in asked}.values())
        notes = (
            *kernel_notes(context.targets, settings),
            *decision.notes,
            *computed_weights(carrier),
        )
        return Survey(rows, requests, notes)

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        decision, weights = self._quantized(carrier, context, statistics)
        outcomes = []
        for layer in decision.layers:
            if layer.name in weights:
                before, quantized = weights[layer.name]
                after = quantized()
                loss = sqnr_db(before(), after.dequantize())
                outcomes.append(LayerOutcome(layer.name, str(after.scheme), loss))
        return Outcome(carrier.with_graph(decision.model), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier, context, statistics)[0].model)

    def _settings(self, context: PassContext) -> StaticSettings:
        return StaticSettings(
            profile_for(context.targets),
            self.weights,
            self.activations,
            self.layers,
            faster=True,
        )

    def _quantized(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> tuple[Decision, dict[str, _Pair]]:
        """Quantize a copy of the graph; return also each weight before and after.

        Both weights are computed when they are asked for.
        """
        decision = self._settings(context).decide(carrier.graph().clone())
        model, schemes = decision.model, decision.schemes
        moments: dict[str, Moments] = {}
        for node, layer in decision.readers.items():
            request = self._moment_request(layer, node) if layer.name in schemes else None
            observed = None if request is None else statistics.get(request.key)
            if observed is not None:
                moments.setdefault(layer.name, observed)
        decision, pixels = decision.with_pixels(statistics, moments)
        floats: dict[str, Callable[[], torch.Tensor]] = {}

        def make_codes(layer: Layer, least: LeastScale) -> Callable[[], QuantizedTensor]:
            tensor = model.graph.initializers[layer.weight].const_value
            assert tensor is not None
            matrix = floats[layer.name] = partial(_matrix, layer, tensor)
            inputs, scheme = moments.get(layer.name), schemes[layer.name]
            return cache(lambda: self._rounded(matrix(), scheme, inputs, least))

        stored = decision.stored
        makers = write_static_codes(decision, decision.codes(pixels, statistics), make_codes)
        editor = Editor(model)
        for layer in decision.layers:
            if layer.name in stored:
                tensor = model.graph.initializers[layer.weight].const_value
                assert tensor is not None
                matrix = floats[layer.name] = partial(_matrix, layer, tensor)
                codes = partial(_nearest, matrix, stored[layer.name])
                makers[layer.name] = attach_codes(
                    editor, layer, stored[layer.name], codes
                ).quantized
        return decision, {name: (matrix, makers[name]) for name, matrix in floats.items()}

    def _moment_request(self, layer: Layer, node: ir.Node) -> Request | None:
        if self.weights.rounding != "gptq" or layer.columns > _MOST_COLUMNS:
            return None
        return moment_request(layer, node)

    def _rounded(
        self, matrix: torch.Tensor, scheme: Scheme, moments: Moments | None, least: LeastScale
    ) -> QuantizedTensor:
        """Quantize a weight ``[rows, columns]``, to nearest where there are no moments."""
        find = mse_parameters if self.weights.range == "mse" else absmax_parameters
        scale, zero = find(matrix, scheme)
        scale = kept_grids(matrix, scale, scheme)
        shared = scale.shape[0] == 1
        if least is not None:
            needed = least()
            scale = torch.maximum(scale, needed.amax(0, keepdim=True) if shared else needed)
        if moments is None:
            return quantize(matrix, scale, zero, scheme)
        vectors = moments.vectors
        if vectors is not None and len(vectors) > _WIDE * vectors.shape[1]:
            return gptq_from_vectors(matrix, vectors, scale, zero, scheme)
        second = copy(moments).second  # of a copy, so that it goes: it may take more than vectors
        # The rows of each channel group are rounded by the moment of that group's inputs.
        rows = matrix.shape[0] // len(second)
        codes = []
        for index, moment in enumerate(second):
            group = slice(index * rows, (index + 1) * rows)
            part = slice(None) if shared else group
            codes.append(gptq(matrix[group], moment, scale[part], zero[part], scheme).codes)
        return QuantizedTensor(torch.cat(codes), scale, zero, scheme)


def _nearest(matrix: Callable[[], torch.Tensor], scheme: Scheme) -> QuantizedTensor:
    values = matrix()
    scale, zero = absmax_parameters(values, scheme)
    return quantize(values, kept_grids(values, scale, scheme), zero, scheme)


def _matrix(layer: Layer, tensor: ir.TensorProtocol) -> torch.Tensor:
    """Return a weight in canonical form, float32 ``[rows, columns]``."""
    return layer.canonical(torch.from_numpy(np.array(tensor.numpy()))).to(torch.float32)
