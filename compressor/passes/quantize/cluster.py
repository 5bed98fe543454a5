"""``cluster``: weights as places in a codebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field

from compressor.errors import DataError, SpecError
from compressor.graph.codes import obstacle
from compressor.graph.layers import moment_request
from compressor.passes.quantize.maths.kmeans import clustered
from compressor.passes.quantize.weights.gptq import known_codes
from compressor.passes.quantize.weights.layers import COMPRESSED_TENSORS, kept_tables, nodes_of
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.matrices import check_finite, sqnr_db
from compressor.types.passes import (
    LayerOutcome,
    LayerRule,
    Outcome,
    Pass,
    PassContext,
    Survey,
)
from compressor.types.quantized import ScaleType, Scheme, WeightCodes
from compressor.types.statistics import Request

Bits = Annotated[int, Field(ge=1, le=8)]
_UNSEEN = "all its weights count alike: its input is not a value that calibration sees"
_NO_CODEBOOKS = {
    "tensorrt": "target tensorrt has no codebooks",
    COMPRESSED_TENSORS: "the compressed-tensors layout has no codebooks",
}


class ClusterRule(LayerRule):
    """Per-layer settings of ``cluster``."""

    bits: Bits | None = Field(default=None, description="width of these layers' codes")
    group_rows: Annotated[int, Field(ge=1)] | Literal["tensor"] | None = Field(
        default=None, description="rows that share a codebook, or tensor: all of a weight"
    )


@dataclass(frozen=True)
class _Choice:
    """Schemes of the layers that are clustered, and why each layer is kept, or an empty text."""

    schemes: Mapping[str, Scheme]
    reasons: Mapping[str, str]
    requests: Mapping[str, Request] = field(default_factory=dict)


class Cluster(Pass):
    """Cluster each layer's weights by k-means, and store for each weight the number of its cluster.

    A codebook holds the mean of each cluster in floating point, so the numbers lie where the
    weights do: of the same bits it leaves less error than evenly spaced integers, and it takes any
    number of bits from 1 to 8. Files become small, most of all as an `archive`; nothing becomes
    faster, because a runtime looks the weights up when it loads the model and then computes with
    floats. Zeros of a pruned layer remain zeros. It needs no data; with `importance` it needs
    calibration data, and weights that meet large inputs get the finer clusters.
    """

    name: ClassVar[str] = "cluster"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS, Capability.GRAPH})
    source: ClassVar[str] = "Han et al. 2016 (arXiv:1510.00149), section 3"

    bits: Bits = Field(default=4, description="width of a code; 2^bits clusters")
    group_rows: int | None = Field(
        default=None,
        ge=1,
        description="output channels that share a codebook; left out, all of a weight do",
    )
    importance: bool = Field(
        default=False,
        description="weigh errors by the square of what the weights are multiplied with, as "
        "calibration finds it",
    )
    layers: tuple[ClusterRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer: to see inputs, it must run."""
        return self.needs | ({Capability.RUN} if self.importance else frozenset())

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers and their schemes, and ask for the size of their inputs."""
        choice = self._choice(carrier, context)
        actions = {name: str(scheme) for name, scheme in choice.schemes.items()}
        rows = plan_layers(self.name, actions, choice.reasons)
        if not self.importance:
            return Survey(rows)
        if not choice.requests:
            raise SpecError(
                "importance",
                "finds no layer whose input it can see",
                "leave it out: all weights then count alike",
            )
        unseen = choice.schemes.keys() - choice.requests.keys()
        rows = tuple(replace(row, reason=_UNSEEN) if row.name in unseen else row for row in rows)
        return Survey(rows, tuple({r.key: r for r in choice.requests.values()}.values()))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Cluster the chosen layers.

        Raises:
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        choice = self._choice(carrier, context)
        codes, outcomes = {}, []
        for layer in carrier.layers():
            if layer.name not in choice.schemes:
                continue
            scheme = choice.schemes[layer.name]
            matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
            check_finite(layer, matrix)
            weights = _importance(layer, choice.requests.get(layer.name), statistics)
            found = clustered(matrix, scheme, weights)
            codes[layer.weight] = known_codes(layer, found)
            loss = sqnr_db(matrix, found.dequantize())
            outcomes.append(LayerOutcome(layer.name, str(scheme), loss))
        return Outcome(carrier.with_codes(codes), tuple(outcomes))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Cluster lazily: no weight is read."""
        schemes = self._choice(carrier, context).schemes
        return carrier.with_codes(
            {
                layer.weight: WeightCodes(layer, own, partial(clustered, scheme=own))
                for layer in carrier.layers()
                if (own := schemes.get(layer.name)) is not None
            }
        )

    def _choice(self, carrier: Carrier, context: PassContext) -> _Choice:
        """Choose.

        Raises:
            SpecError: a rule matches no layer, or an export has no codebooks.
        """
        layers = carrier.layers()
        rules = resolve_rules(self.layers, [layer.name for layer in layers])
        kept, model = kept_tables(carrier), carrier.graph()
        schemes, reasons = {}, {}
        for layer in layers:
            rule = rules[layer.name]
            scheme = self._scheme(layer, rule)
            reason = skip_reason(rule) or kept.get(layer.name, "")
            if not reason and layer.weight not in model.graph.initializers:
                reason = "its weight lies in a subgraph"
            reason = reason or obstacle(layer, scheme, model.opset_imports.get("", 0)) or ""
            reasons[layer.name] = reason
            if not reason:
                _check_targets(layer, scheme, context.targets)
                schemes[layer.name] = scheme
        requests = {}
        if self.importance:
            nodes = nodes_of(model)
            for name in schemes.keys() & nodes.keys():
                request = moment_request(*nodes[name])
                if request is not None:
                    requests[name] = replace(request, observer="column-norm")
        return _Choice(schemes, reasons, {n: requests[n] for n in schemes if n in requests})

    def _scheme(self, layer: Layer, rule: ClusterRule | None) -> Scheme:
        bits, group = self.bits, self.group_rows
        if rule is not None:
            bits = bits if rule.bits is None else rule.bits
            own = rule.group_rows
            group = group if own is None else None if own == "tensor" else own
        if group is not None and group >= layer.rows:
            group = None
        return Scheme(
            bits,
            signed=False,
            granularity="tensor" if group is None else "rows",
            group=group,
            element="codebook",
            scale_type=cast("ScaleType", layer.dtype),
        )


def _check_targets(layer: Layer, scheme: Scheme, targets: frozenset[str]) -> None:
    for target in sorted(targets & _NO_CODEBOOKS.keys()):
        raise SpecError(
            f"layer {layer.name!r}",
            f"would be {scheme}, and {_NO_CODEBOOKS[target]}",
            "leave out the pass or that export",
        )


def _importance(
    layer: Layer, request: Request | None, statistics: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the squared norm of what each weight is multiplied with, ``[rows, columns]``."""
    if request is None:
        return None
    norms = statistics.get(request.key)
    if not isinstance(norms, torch.Tensor):
        raise DataError(
            f"layer {layer.name!r}",
            f"calibration found nothing about its input {request.tensor!r}",
            "skip the layer, or leave out importance",
        )
    squares = norms.to(torch.float64).square()
    return squares.repeat_interleave(layer.rows // len(squares), 0)
