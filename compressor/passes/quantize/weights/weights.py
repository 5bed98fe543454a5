"""Codes of weights that are quantized some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.models.checkpoint.rows import all_rows, read_rows
from compressor.passes.quantize.maths.affine import sqnr_db
from compressor.passes.quantize.maths.floating import (
    RangeSearch,
    check_finite,
    nvfp4_tensor_scale,
    round_to_nearest,
)
from compressor.passes.quantize.maths.hqq import hqq
from compressor.passes.quantize.weights.awq import AwqWork, plan_awq
from compressor.passes.quantize.weights.gptq import GptqWork, known_codes, plan_gptq
from compressor.passes.quantize.weights.layers import (
    Bits,
    Choice,
    Format,
    Method,
    Preset,
    WeightRule,
    Wish,
    choose_layers,
    numbers_of,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.layers import Layer
from compressor.types.passes import LayerOutcome, Outcome, Pass, PassContext, Survey
from compressor.types.quantized import QuantizedTensor, Scheme, WeightCodes
from compressor.types.statistics import Blocks


class Nvfp4Rows:
    """Rounds rows of one weight to nvfp4, whose scales share a scale of the whole weight.

    Args:
        scheme: an nvfp4 scheme.
        search: how the scales of groups are found.
        read: yields all rows of the weight in canonical form, some at a time; called when codes
            are first wanted.
    """

    def __init__(
        self, scheme: Scheme, search: RangeSearch, read: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self._scheme = scheme
        self._search: RangeSearch = search
        self._read = read

    def __call__(self, matrix: torch.Tensor) -> QuantizedTensor:
        """Return the codes of some rows, ``[rows, columns]``."""
        return round_to_nearest(matrix, self._scheme, self._search, self._tensor_scale)

    @cached_property
    def _tensor_scale(self) -> torch.Tensor:
        parts = [rows.abs().amax() for rows in self._read()]
        return nvfp4_tensor_scale(torch.stack(parts).amax().to(torch.float32))


_CALIBRATED = ("gptq", "awq")
_SAMPLE_ROWS = 32  # the first ones, of the weights of a model that is streamed


class QuantizeWeights(Pass):
    """Store weights as integers of 8 to 2 bits, or as floats of 8 or 4; activations stay floats.

    Large language models spend their time on reading weights: with a quarter of the bytes they
    answer faster, and fit where they did not. `rtn` rounds to nearest; `hqq` fits zero points to
    the weights' outliers; both need weights alone and so serve checkpoints that are larger than
    memory. `gptq` makes up for each rounding error with the weights still to be rounded; `awq`
    gives the channels with large activations finer steps; both need calibration data and a model
    that runs, and work through it block by block.
    """

    name: ClassVar[str] = "quantize-weights"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})
    source: ClassVar[str] = (
        "hqq: Badri & Shaji 2023 (mobiusml.github.io/hqq_blog); gptq: Frantar et al. 2022 "
        "(arXiv:2210.17323); awq: Lin et al. 2023 (arXiv:2306.00978); mxfp4: OCP Microscaling "
        "Formats 1.0; nvfp4: NVIDIA 2025"
    )

    preset: Preset | None = Field(
        default=None,
        description="a common choice of what follows; int4-g128 where nothing else is given. "
        "Layers whose columns do not divide into a preset's groups are kept",
    )
    bits: Bits | None = Field(default=None, description="in place of a preset: width of a weight")
    group: int | None = Field(
        default=None, ge=1, description="columns that share a scale; left out, a whole row does"
    )
    symmetric: bool | None = Field(
        default=None, description="zero point 0 (so it is unless false is given)"
    )
    format: Format | None = Field(
        default=None, description="integers (so it is unless given), or a format of floats"
    )
    method: Method = Field(default="rtn", description="how codes are found")
    range: RangeSearch | None = Field(
        default=None,
        description="full range, or the one of least squared error; left out, min-max for rtn and "
        "mse for gptq and awq. hqq has its own way",
    )
    embeddings: bool = Field(
        default=False,
        description="quantize tables of embeddings too, and the output layer",
    )
    layers: tuple[WeightRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer for the method."""
        if self.method in _CALIBRATED:
            return frozenset({Capability.WEIGHTS, Capability.RUN, Capability.GRAPH})
        return self.needs

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers and their schemes, and ask for the moments of their inputs."""
        choice = self._choice(carrier, context)
        actions = {name: str(scheme) for name, scheme in choice.schemes.items()}
        rows = plan_layers(self.name, actions, choice.reasons)
        if self.method not in _CALIBRATED:
            return Survey(rows)
        work = self._work(carrier, choice)
        work.check()
        rows = tuple(replace(row, reason=work.remarks.get(row.name, row.reason)) for row in rows)
        return Survey(rows, work.requests, blockwise=True)

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Quantize the chosen layers by their weights alone; codes are found when they are read."""
        choice = self._choice(carrier, context)
        layers = _chosen(carrier, choice)
        codes = self._all_codes(carrier, choice)
        streamed = Capability.RUN not in carrier.offers
        outcomes = (_outcome(carrier, codes[x.weight], sampled=streamed) for x in layers)
        return Outcome(carrier.with_codes(codes), tuple(outcomes))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Quantize lazily, whatever the method: no weight is read."""
        return carrier.with_codes(self._all_codes(carrier, self._choice(carrier, context)))

    def apply_blockwise(self, carrier: Carrier, context: PassContext, blocks: Blocks) -> Outcome:
        """Quantize the chosen layers block by block, each with what flows into it."""
        choice = self._choice(carrier, context)
        layers = _chosen(carrier, choice)
        work = self._work(carrier, choice)
        codes: dict[str, WeightCodes] = {}
        floats: dict[str, torch.Tensor] = {}
        losses: dict[str, float | None] = {}
        for block in blocks:
            here = [x for x in layers if x.weight in block.weights and x.weight not in codes]
            found = work.quantized(here, block)
            for layer in here:
                matrix = work.matrix(layer)
                if layer.weight not in found:
                    own = choice.schemes[layer.name]
                    nearest = round_to_nearest(matrix, own, self.range or "mse")
                    found[layer.weight] = known_codes(layer, nearest)
                quantized = found[layer.weight].compute(matrix)
                losses[layer.name] = sqnr_db(matrix.to(torch.float32), quantized.dequantize())
            changed = work.floats()
            block.replace({**changed, **found})
            codes.update(found)
            floats.update(changed)
        outcomes = []
        for layer in layers:
            scheme = str(choice.schemes[layer.name])
            loss, rescaled = losses[layer.name], layer.name in work.rescaled
            outcomes.append(LayerOutcome(layer.name, scheme, loss, rescaled=rescaled))
        changed_carrier = carrier.with_weights(floats) if floats else carrier
        ordered = {layer.weight: codes[layer.weight] for layer in layers}
        return Outcome(changed_carrier.with_codes(ordered), tuple(outcomes))

    def _choice(self, carrier: Carrier, context: PassContext) -> Choice:
        numbers = numbers_of(self.preset, self.bits, self.group, self.symmetric, self.format)
        if self.method == "hqq" and self.range is not None:
            raise SpecError("range", "is given, and hqq finds ranges its own way", "leave it out")
        preset = self.bits is None and self.format is None
        wish = Wish(numbers, preset, self.embeddings, self.layers, context.targets)
        choice = choose_layers(carrier, wish)
        if self.method == "hqq":
            for name, scheme in choice.schemes.items():
                if scheme.element != "int":
                    raise SpecError(
                        "method 'hqq'",
                        f"rounds to integers, layer {name!r} is to be {scheme}",
                        "use another method, or format: int",
                    )
        return choice

    def _work(self, carrier: Carrier, choice: Choice) -> GptqWork | AwqWork:
        search: RangeSearch = self.range or "mse"
        if self.method == "gptq":
            return plan_gptq(carrier, choice.schemes, search)
        return plan_awq(carrier, choice.schemes, search)

    def _all_codes(self, carrier: Carrier, choice: Choice) -> dict[str, WeightCodes]:
        return {
            layer.weight: self._codes(carrier, layer, choice.schemes[layer.name])
            for layer in _chosen(carrier, choice)
        }

    def _codes(self, carrier: Carrier, layer: Layer, scheme: Scheme) -> WeightCodes:
        """Return the codes that the weight alone determines, found when they are wanted."""
        if self.method == "hqq":
            return WeightCodes(layer, scheme, partial(hqq, scheme=scheme), by_rows=True)
        search: RangeSearch = self.range or ("mse" if self.method in _CALIBRATED else "min-max")
        compute: Callable[[torch.Tensor], QuantizedTensor]
        if scheme.scale_type == "e4m3":
            compute = Nvfp4Rows(scheme, search, partial(all_rows, carrier, layer))
        else:
            compute = partial(round_to_nearest, scheme=scheme, search=search)
        return WeightCodes(layer, scheme, compute, by_rows=True)


def _chosen(carrier: Carrier, choice: Choice) -> list[Layer]:
    return [layer for layer in carrier.layers() if layer.name in choice.schemes]


def _outcome(carrier: Carrier, codes: WeightCodes, *, sampled: bool) -> LayerOutcome:
    """Compare codes with the weight; of a streamed model's, with a part that is read quickly.

    Raises:
        ModelError: the weight holds NaN or infinity.
    """
    layer = codes.layer
    details: dict[str, Any] = {}
    rows = layer.rows
    if sampled and rows > _SAMPLE_ROWS:
        # Elsewhere would be more seeks on a cold disk, before anything is streamed.
        rows = _SAMPLE_ROWS
        details["weight_sqnr_rows"] = rows
    matrix = read_rows(carrier, layer, 0, rows)
    wanted = matrix.to(torch.float32)
    check_finite(layer, wanted)
    loss = sqnr_db(wanted, codes.compute(matrix).dequantize())
    return LayerOutcome(layer.name, str(codes.scheme), loss, details)
