"""``cluster``: weights as places in a codebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.codes import obstacle
from compressor.models.layer_uses import inner_layers, input_moments, kept_tables, recurrences
from compressor.passes.quantize.maths.floating import shortened
from compressor.passes.quantize.maths.kmeans import clustered
from compressor.passes.quantize.weights.inputs import COMPRESSED_TENSORS
from compressor.run.weight_pass import Changes, Choice, Treatment, WeightPass, WeightRows
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer, QuantizedTensor, ScaleType, Scheme
from compressor.types.passes import LayerRule, Outcome, PassContext
from compressor.types.statistics import Request, found_about

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


class Cluster(WeightPass):
    """Cluster each layer's weights by k-means, and store for each weight the number of its cluster.

    A codebook holds the mean of each cluster in floating point. At the same number of bits it
    leaves less error than evenly spaced integers, and any number from 1 to 8 works. Files become
    small, most of all as an `archive`. Nothing becomes faster, because a runtime looks the weights
    up when it loads the model and then computes with floats. Zeros of a pruned layer remain zeros.
    The pass needs no data, except calibration data for `importance`, which gives weights with large
    inputs finer clusters.
    """

    name: ClassVar[str] = "cluster"
    by_rows: ClassVar[bool] = False
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS, Capability.GRAPH})
    source: ClassVar[str] = "Han et al. 2016 (arXiv:1510.00149), section 3"

    bits: Bits = Field(default=4, description="width of a code; 2^bits clusters")
    group_rows: int | None = Field(
        default=None,
        ge=1,
        description="output channels that share a codebook; default: all of a weight",
    )
    importance: bool = Field(
        default=False,
        description="weight errors by the square of the weights' inputs in calibration",
    )
    float_bits: int | None = Field(
        default=None,
        ge=3,
        le=24,
        description="significant bits of the remaining floats: codebooks, biases and other "
        "vectors; an archive takes fewer bytes with fewer bits",
    )
    layers: tuple[ClusterRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer: to see inputs, it must run."""
        return self.needs | ({Capability.RUN} if self.importance else frozenset())

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:
        """Return each layer's scheme, and the size of its inputs as what to observe.

        Raises:
            SpecError: a rule matches no layer, an export has no codebooks, or importance finds no
                input to observe.
        """
        rules = resolve_rules(self.layers, carrier.layers())
        kept = {**inner_layers(carrier), **kept_tables(carrier), **recurrences(carrier)}
        model = carrier.graph()
        opset = model.opset_imports.get("", 0)
        moments = input_moments(model) if self.importance else {}
        treatments = {}
        for layer in carrier.layers():
            rule = rules[layer.name]
            scheme = self._scheme(layer, rule)
            reason = skip_reason(rule) or kept.get(layer.name) or obstacle(layer, scheme, opset)
            if reason:
                treatments[layer.name] = Treatment(str(scheme), kept=reason)
                continue
            for target in sorted(context.targets & _NO_CODEBOOKS.keys()):
                raise SpecError(
                    f"layer {layer.name!r}",
                    f"would be {scheme}, and {_NO_CODEBOOKS[target]}",
                    "leave out the pass or that export",
                )
            moment = moments.get(layer.name)
            treatments[layer.name] = Treatment(
                str(scheme),
                remark=_UNSEEN if self.importance and moment is None else "",
                setting=scheme,
                request=None if moment is None else replace(moment, observer="column-norm"),
            )
        clustered_layers = [t for t in treatments.values() if not t.kept]
        if self.importance and clustered_layers and not any(t.request for t in clustered_layers):
            raise SpecError(
                "importance",
                "finds no layer whose input it can see",
                "leave it out: all weights then count alike",
            )
        return Choice(treatments)

    def change(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> QuantizedTensor:
        """Return the codes of a whole weight, and its codebooks."""
        assert treatment.scheme is not None
        weights = _importance(rows.layer, treatment.request, statistics)
        found = clustered(rows.matrix, treatment.scheme, weights)
        if self.float_bits is None or found.codebook is None:
            return found
        return replace(found, codebook=shortened(found.codebook, self.float_bits))

    def conclude(self, carrier: Carrier, choice: Choice, changes: Changes) -> Outcome:
        """Round what is a vector, too."""
        weights = {layer.weight for layer in carrier.layers()}
        for name, stored in carrier.tensors().items() if self.float_bits is not None else ():
            if name in weights or len(stored.shape) != 1:
                continue
            tensor = stored.read()
            if tensor.is_floating_point() and tensor.numel() > 1:
                changes.weights[name] = shortened(tensor, self.float_bits or 0)
        return super().conclude(carrier, choice, changes)

    def _scheme(self, layer: Layer, rule: ClusterRule | None) -> Scheme:
        bits, group = self.bits, self.group_rows
        if rule is not None:
            bits = bits if rule.bits is None else rule.bits
            rows = rule.group_rows
            group = group if rows is None else None if rows == "tensor" else rows
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


def _importance(
    layer: Layer, request: Request | None, statistics: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the squared norm of what each weight is multiplied with, ``[rows, columns]``."""
    if request is None:
        return None
    norms = found_about(layer.name, request, statistics, torch.Tensor, "leave out importance")
    squares = norms.to(torch.float64).square()
    return squares.repeat_interleave(layer.rows // len(squares), 0)
