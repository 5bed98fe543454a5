"""``cast``: half precision, with float32 islands where it would not do; or back to float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.editing import Editor
from compressor.graph.layers import graph_layers, layers_of
from compressor.graph.skeleton import converted
from compressor.graph.stored_weights import is_quantized
from compressor.graph.values import all_nodes
from compressor.passes.quantize.cast.dequantize import dequantize
from compressor.passes.quantize.cast.islands import FloatIslands, extreme
from compressor.passes.quantize.cast.rewrite import HALVES, store_narrow, to_half, to_single
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason, unfit_type
from compressor.types.layers import Layer, sqnr_db
from compressor.types.passes import GraphPass, LayerOutcome, LayerRule, Outcome, PassContext, Survey

_TYPES = {
    "fp16": (ir.DataType.FLOAT16, torch.float16),
    "bf16": (ir.DataType.BFLOAT16, torch.bfloat16),
}
_OTHERS = ("float16", "bfloat16", "float64")
_BF16_OPSET = 22  # the first whose convolutions and pooling take it
_WITHOUT_BF16 = frozenset({"ort-cpu", "ort-cuda", "openvino"})
_BF16_MAX = float(torch.finfo(torch.bfloat16).max)


@dataclass(frozen=True)
class _Decision:
    """What is done to a copy of the graph."""

    model: ir.Model
    reasons: dict[str, str]  # why a layer keeps its weight, empty where it does not, by name
    islands: FloatIslands | None  # none where weights only are cast


class Cast(GraphPass):
    """Compute in half precision, and store weights in it.

    Operators that lose too much in 16 bits stay in float32: sums over many terms, exponentials,
    powers, angles, everything computed from positions, and in float16 what reads a constant beyond
    its range. A Cast stands only where a value crosses a border. With ``weights-only``, only the
    layers' weights are narrow: they are cast back when they are read.

    Conversely, ``fp32`` makes a float16, bfloat16, float64 or quantized model compute in float32,
    whichever tool quantized it. Weights take the values of their codes, and activations are not
    rounded. Put it before passes that quantize such a model again, for example for another target.
    """

    name: ClassVar[str] = "cast"
    version: ClassVar[int] = 3
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH})
    source: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, 2017 (arXiv:1710.03740)"

    dtype: Literal["fp16", "bf16", "fp32"] = Field(
        default="fp16",
        description="the new type; bf16 without weights-only is for tensorrt and compressor.load; "
        "fp32 is for half-precision, float64 and quantized models",
    )
    keep_io: bool = Field(
        default=True, description="inputs and outputs of the model keep their type"
    )
    weights_only: bool = Field(
        default=False,
        description="store weights in the narrow type and compute in float32: half the bytes, on "
        "every runtime",
    )
    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @property
    def estimated(self) -> bool:
        """A weight that float16 cannot hold stays as it is."""
        return self.dtype == "fp16"

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers and the float32 islands, by operators and types alone."""
        self._check(context)
        if self.dtype == "fp32":
            reasons = self._widened(carrier)[1]
            return Survey(plan_layers(self.name, dict.fromkeys(reasons, self.dtype), reasons))
        decision = self._decide(carrier, evaluate=False)
        action = f"{self.dtype} weights" if self.weights_only else self.dtype
        actions = dict.fromkeys(decision.reasons, action)
        quantized = is_quantized(decision.model)
        rows = plan_layers(self.name, actions, decision.reasons, quantized=quantized)
        return Survey(rows, notes=self._notes(decision, context))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Cast the model; layers whose weights would overflow stay as they are."""
        if self.dtype == "fp32":
            widened, reasons = self._widened(carrier)
            changed = (name for name, reason in reasons.items() if not reason)
            return Outcome(widened, tuple(LayerOutcome(name, "float32") for name in changed))
        planned = self._decide(carrier, evaluate=False).reasons
        decision = self._decide(carrier, evaluate=True)
        notes = tuple(
            f"layer {name!r} stays in float32: {reason}"
            for name, reason in decision.reasons.items()
            if reason and not planned[name]
        )
        outcomes = tuple(
            self._outcome(carrier, layer)
            for layer in carrier.layers()
            if not decision.reasons[layer.name]
        )
        return Outcome(carrier.with_graph(self._rewritten(decision)), outcomes, notes)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Cast lazily: no weight is read, so overflow is not seen."""
        if self.dtype == "fp32":
            return self._widened(carrier)[0]
        return carrier.with_graph(self._rewritten(self._decide(carrier, evaluate=False)))

    def _widened(self, carrier: Carrier) -> tuple[Carrier, dict[str, str]]:
        """Return a model of float32, and why each of its layers is as it was; empty where not."""
        model = carrier.graph().clone()
        decoded = dequantize(model)
        others = {layer.name: layer.dtype for layer in carrier.layers() if layer.dtype in _OTHERS}
        # A model of float32 may compute a few numbers, such as positions, in float64 on purpose.
        wide = (ir.DataType.DOUBLE,) if "float64" in others.values() else ()
        to_single(model, keep_io=self.keep_io, types=(*HALVES, *wide))
        reasons = {}
        for layer in graph_layers(model):
            changed = layer.weight in decoded or layer.name in others
            reasons[layer.name] = "" if changed else f"its weight is {layer.dtype} already"
        return carrier.with_graph(model), reasons

    def _check(self, context: PassContext) -> None:
        if self.dtype == "fp32" and (self.weights_only or self.layers):
            raise SpecError(
                "pass 'cast'",
                "dtype fp32 is for the whole model",
                "leave out weights-only and layers",
            )
        others = sorted(context.targets & _WITHOUT_BF16)
        if self.dtype == "bf16" and not self.weights_only and others:
            raise SpecError(
                "pass 'cast'",
                f"dtype bf16 does not run in the onnx export's target {others[0]}: it has no "
                "bfloat16 kernels for MatMul, Gemm, Conv or Add",
                "set weights-only: true to store weights as bf16, or dtype: fp16, or target: "
                "tensorrt",
            )
        if self.weights_only and not self.keep_io:
            raise SpecError(
                "pass 'cast'",
                "keep-io: false has no meaning with weights-only: true",
                "leave out one of them",
            )

    def _decide(self, carrier: Carrier, *, evaluate: bool) -> _Decision:
        model = carrier.graph().clone()
        if self.dtype == "bf16" and model.opset_imports.get("", _BF16_OPSET) < _BF16_OPSET:
            model = converted(model, _BF16_OPSET)
        layers = carrier.layers()
        rules = resolve_rules(self.layers, layers)
        reasons = {}
        for layer in layers:
            reasons[layer.name] = skip_reason(rules[layer.name]) or _unfit(model, layer)
        skipped = {layer.weight: reasons[layer.name] for layer in layers if reasons[layer.name]}
        if self.weights_only:
            for layer in layers:
                if not reasons[layer.name] and _is_output(model, layer):
                    reasons[layer.name] = "its weight is an output of the model"
                if evaluate and not reasons[layer.name]:
                    reasons[layer.name] = self._too_large(model, layer)
            return _Decision(model, reasons, None)
        islands = FloatIslands(
            model, skipped, keep_io=self.keep_io, evaluate=evaluate, narrow=_TYPES[self.dtype][0]
        )
        names = {layer.weight: layer.name for layer in layers}
        for layer, node in _read_weights(model):
            reason = islands.reasons.get(node, "")
            name = names[layer.weight]
            reasons[name] = reasons[name] or reason
        return _Decision(model, reasons, islands)

    def _too_large(self, model: ir.Model, layer: Layer) -> str:
        tensor = model.graph.initializers[layer.weight].const_value
        assert tensor is not None
        array = np.asarray(tensor.numpy())
        if self.dtype == "fp16":
            problem = extreme(array)
            return f"its weight {problem}" if "above" in problem else ""
        largest = float(np.abs(array).max(initial=0.0))
        return "" if largest <= _BF16_MAX else f"its weight reaches {largest:.3g}"

    def _rewritten(self, decision: _Decision) -> ir.Model:
        model = decision.model
        if decision.islands is not None:
            to_half(model, decision.islands)
            return model
        editor = Editor(model)
        weights = {layer.weight: layer.name for layer, _ in _read_weights(model)}
        for weight, name in weights.items():
            if not decision.reasons[name]:
                store_narrow(editor, model.graph.initializers[weight], _TYPES[self.dtype][0])
        return model

    def _outcome(self, carrier: Carrier, layer: Layer) -> LayerOutcome:
        weight = carrier.weight(layer)
        narrow = weight.to(_TYPES[self.dtype][1])
        vanished = int(((weight != 0) & (narrow == 0)).sum())
        return LayerOutcome(layer.name, self.dtype, sqnr_db(weight, narrow), {"vanished": vanished})

    def _notes(self, decision: _Decision, context: PassContext) -> tuple[str, ...]:
        notes = []
        if decision.islands is not None:
            kept = decision.islands.reasons
            counted = Counter(
                (node.op_type, kept[node]) for node in kept if decision.islands.computes(node)
            )
            if counted:
                listed = ", ".join(f"{n} {op} ({why})" for (op, why), n in counted.most_common(6))
                notes.append(f"operators that stay in float32: {listed}")
            if "ort-cpu" in context.targets:
                notes.append(
                    "ONNX Runtime's CPU provider computes most float16 operators in float32: "
                    "smaller, not faster"
                )
        return tuple(notes)


def _read_weights(model: ir.Model) -> Iterator[tuple[Layer, ir.Node]]:
    for node in all_nodes(model.graph):
        yield from ((layer, node) for layer in layers_of(node))


def _is_output(model: ir.Model, layer: Layer) -> bool:
    """Whether the model returns a layer's weight, whose type would change."""
    value = model.graph.initializers.get(layer.weight)
    return value is not None and value.is_graph_output()


def _unfit(model: ir.Model, layer: Layer) -> str:
    if layer.weight not in model.graph.initializers:
        return "its weight lies in a subgraph"
    if layer.dtype != "float32":
        return unfit_type(layer.dtype)
    return ""
