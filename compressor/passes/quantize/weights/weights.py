"""``quantize-weights``: weights in few bits, activations as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.checkpoint.rows import all_rows
from compressor.models.checkpoint.stacked_experts import unstacked
from compressor.models.layer_uses import computed_weights
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.quantize.block_codes import BY_BLOCK
from compressor.passes.quantize.cast.rewrite import in_single
from compressor.passes.quantize.maths.floating import (
    RangeSearch,
    nvfp4_tensor_scale,
    round_to_nearest,
)
from compressor.passes.quantize.maths.hqq import hqq
from compressor.passes.quantize.weights.awq import plan_awq
from compressor.passes.quantize.weights.gptq import (
    GptqWork,
    check_training,
    memory_of_training,
    plan_gptq,
    with_trained_codes,
)
from compressor.passes.quantize.weights.inputs import with_input_scales, with_spans
from compressor.passes.quantize.weights.layers import (
    GGUF,
    Bits,
    Format,
    Method,
    Numbers,
    Preset,
    WeightRule,
    choose_layers,
    input_scheme,
    numbers_of,
)
from compressor.run.weight_pass import (
    Changes,
    Choice,
    Treatment,
    WeightPass,
    WeightRows,
    compared,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.passes import Outcome, PassContext, Survey
from compressor.types.rounded_inputs import InputFormat
from compressor.types.statistics import Block

_WITHOUT_BF16 = frozenset({"ort-cpu", "ort-cuda", "openvino"})  # targets


class Nvfp4Rows:
    """Rounds rows of one weight to nvfp4, whose scales share a scale of the whole weight.

    ``read`` yields all rows in canonical form, some at a time; it is called when codes are first
    wanted.
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


class QuantizeWeights(WeightPass):
    """Store weights as integers of 8 to 2 bits, or as floats of 8 or 4; activations stay floats.

    Large language models spend their time reading weights: with a quarter of the bytes they answer
    faster and fit into less memory. `rtn` rounds to nearest, and `hqq` fits zero points to the
    weights' outliers; both need only weights, so they suit checkpoints larger than memory. `gptq`
    compensates each rounding error in the weights still to be rounded. `awq` gives channels with
    large activations finer steps. `reconstruct` starts from `gptq` and trains codes and scales: all
    together by the divergence from the float model if the metric reads scores of classes, otherwise
    block by block. These three need calibration data. They also take the
    checkpoint of a causal language model and work block by block, of which memory holds one;
    `reconstruct` trains each block there by what the network makes of errors in its outputs.
    """

    name: ClassVar[str] = "quantize-weights"
    version: ClassVar[int] = 10
    widens: ClassVar[bool] = False  # rounding widens a few rows at a time
    source: ClassVar[str] = (
        "hqq: Badri & Shaji 2023 (mobiusml.github.io/hqq_blog); gptq: Frantar et al. 2022 "
        "(arXiv:2210.17323); awq: Lin et al. 2023 (arXiv:2306.00978); reconstruct: Nagel et al. "
        "2020 (arXiv:2004.10568), Li et al. 2021 (arXiv:2102.05426), Liu et al. 2023 "
        "(arXiv:2305.17888), Chen et al. 2024 (arXiv:2407.11062); mxfp4: OCP Microscaling "
        "Formats 1.0; nvfp4: NVIDIA 2025"
    )

    preset: Preset | None = Field(
        default=None,
        description="a common choice of the options below; int4-g128 if none is set. Layers whose "
        "columns do not divide into a preset's groups are kept",
    )
    bits: Bits | None = Field(default=None, description="in place of a preset: width of a weight")
    group: int | None = Field(
        default=None, ge=1, description="columns that share a scale; default: a whole row"
    )
    symmetric: bool | None = Field(
        default=None,
        description="zero point 0 (the default; hqq, which fits zero points, has them unless this "
        "is true or a target takes none)",
    )
    format: Format | None = Field(
        default=None, description="integers (the default), or a format of floats"
    )
    method: Method = Field(default="rtn", description="how codes are found")
    range: RangeSearch | None = Field(
        default=None,
        description="full range, or the range of least squared error; default: min-max for rtn, "
        "mse for the other methods. hqq has its own search",
    )
    activations: InputFormat | None = Field(
        default=None,
        description="what the inputs of layers are rounded to at run time, in a bare checkpoint; "
        "default: the preset's choice, or nothing",
    )
    static: bool | None = Field(
        default=None,
        description="one scale for all of a layer's inputs, from calibration data, in place of "
        "one for each token",
    )
    embeddings: bool = Field(
        default=False, description="quantize tables of embeddings too, and the output layer"
    )
    layers: tuple[WeightRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer for the method."""
        if self.by_block:
            return frozenset({Capability.WEIGHTS, Capability.RUN, Capability.GRAPH})
        return self.needs

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model in the form that is quantized.

        A graph that computes in bfloat16 is one of float32 where no target can. Experts that a
        checkpoint stacks are layers of their own, as the layouts of directories have them.
        """
        if isinstance(carrier, CheckpointCarrier) and GGUF in context.targets:
            return carrier
        if isinstance(carrier, BlockCheckpoint):
            return carrier.unstacked()
        if isinstance(carrier, CheckpointCarrier):
            return unstacked(carrier)
        if carrier.kind != "onnx" or not context.targets & _WITHOUT_BF16:
            return carrier
        return in_single(carrier, (ir.DataType.BFLOAT16,))

    @property
    def by_block(self) -> bool:
        """Whether the method needs to see what flows into each block as it is quantized."""
        return self.method in ("gptq", "awq", "reconstruct") or self._sees_inputs

    @property
    def by_metric(self) -> bool:
        """Whether the metric decides what is trained for: of scores, the divergence."""
        return self.method == "reconstruct"

    @property
    def in_blocks(self) -> bool:
        """Whether each block's inputs have to be seen."""
        return self.by_block

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:
        """Return each layer's scheme, and what the method has to know of its inputs.

        Raises:
            SpecError: see :func:`choose_layers`; or the method does not fit the schemes.
        """
        if self.method == "hqq" and self.range is not None:
            raise SpecError("range", "is set, but hqq finds ranges its own way", "leave it out")
        numbers = self._numbers
        if self.method == "hqq" and self.symmetric is None and "tensorrt" not in context.targets:
            numbers = replace(numbers, symmetric=False)  # zero points are what it fits
        self._check_tables(numbers)
        preset = self.bits is None and self.format is None
        where = (numbers, self.layers, context.targets)
        treatments = choose_layers(carrier, *where, fits=preset, tables=self.embeddings)
        treatments = with_spans(carrier, treatments)
        schemes = {name: t.scheme for name, t in treatments.items() if t.scheme is not None}
        for name, scheme in schemes.items():
            if self.method == "hqq" and scheme.element != "int":
                raise SpecError(
                    "method 'hqq'",
                    f"rounds to integers, layer {name!r} is to be {scheme}",
                    "use another method, or format: int",
                )
        notes = computed_weights(carrier)
        if self.method in ("rtn", "hqq") or not schemes:
            return Choice(treatments, notes)
        plan = plan_awq if self.method == "awq" else plan_gptq
        work = plan(carrier, schemes, self._search)
        work.check()
        if self.method == "reconstruct":
            check_training(carrier, treatments)
            assert isinstance(work, GptqWork)
            work = replace(work, context=context)
            if isinstance(carrier, BlockCheckpoint):
                notes += (BY_BLOCK,)
        for name in schemes:
            treatments[name] = replace(
                treatments[name], remark=work.remarks.get(name, ""), request=work.by_layer.get(name)
            )
        return Choice(treatments, notes, work)

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return the plan's rows, what is asked of calibration, and what training takes."""
        found = super().survey(carrier, context)
        if self.method != "reconstruct":
            return found
        chosen = {row.name for row in found.layers if row.touched}
        layers = [layer for layer in carrier.layers() if layer.name in chosen]
        return replace(found, memory=memory_of_training(carrier, layers, context))

    def change(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> QuantizedTensor:
        """Return the codes that the weight alone determines."""
        assert treatment.scheme is not None
        if self.method == "hqq":
            return hqq(rows.matrix, treatment.scheme)
        return round_to_nearest(rows.matrix, scheme=treatment.scheme, search=self._search)

    def change_layers(
        self, carrier: Carrier, choice: Choice, layers: Sequence[Layer], block: Block
    ) -> Changes:
        """Quantize a block's layers together where the method does, the others one by one."""
        work = choice.work
        if work is None:
            alone = super().change_layers(carrier, choice, layers, block)
            return with_input_scales(alone, choice, block)
        changes = Changes()
        quantized = work.quantized(layers, block)
        for layer in layers:
            matrix = work.matrix(layer)
            if layer.weight not in quantized:
                nearest = self.change(WeightRows(layer, matrix), choice.treatments[layer.name], {})
                quantized[layer.weight] = WeightCodes.known(layer, nearest)
            codes = quantized[layer.weight]
            treatment, value = choice.treatments[layer.name], codes.compute(matrix)
            changes.outcomes[layer.name] = compared(layer, treatment, matrix, value)
        changes.weights = {**work.floats(), **quantized}
        return with_input_scales(changes, choice, block)

    def conclude(self, carrier: Carrier, choice: Choice, changes: Changes) -> Outcome:
        """Return the model with its codes; with method reconstruct, they are trained first."""
        if self.method == "reconstruct" and choice.work is not None:
            changes = with_trained_codes(carrier, choice, changes, self.name)
        outcome, work = super().conclude(carrier, choice, changes), choice.work
        return outcome if work is None else replace(outcome, rescale=work.rescale)

    @property
    def _search(self) -> RangeSearch:
        return self.range or ("min-max" if self.method in ("rtn", "hqq") else "mse")

    @property
    def _numbers(self) -> Numbers:
        """What is given for all layers."""
        given = (self.preset, self.bits, self.group, self.symmetric, self.format)
        numbers = numbers_of(*given)
        return replace(numbers, inputs=input_scheme(self.activations, self.static, numbers.inputs))

    @property
    def _sees_inputs(self) -> bool:
        """Whether something is stored about inputs that calibration has to find."""
        numbers = self._numbers
        found = [numbers.inputs, *(numbers.changed(rule).inputs for rule in self.layers)]
        return any(inputs is not None and inputs.calibrated for inputs in found)

    def _check_tables(self, numbers: Numbers) -> None:
        if self.embeddings and numbers.inputs is not None:
            raise SpecError(
                "embeddings",
                f"are to be quantized with {numbers.inputs}, but the inputs of tables are indices",
                "leave out embeddings, or use a preset for weights alone",
            )

    def _computation(
        self, carrier: Carrier, layer: Layer, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> Callable[..., Any]:
        if treatment.scheme is not None and treatment.scheme.scale_type == "e4m3":
            # The scale of the whole tensor is found before the first rows are rounded.
            return Nvfp4Rows(treatment.scheme, self._search, partial(all_rows, carrier, layer))
        return super()._computation(carrier, layer, treatment, statistics)
