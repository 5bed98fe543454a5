"""Lower a graph to LiteRT's operators: what is live, what computes with codes, what is taken in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from ai_edge_litert import schema_py_generated as schema

from compressor.errors import SpecError
from compressor.exporters.device_exporter import kernel_multiplies
from compressor.exporters.litert.file import Quantization, Tensor
from compressor.exporters.litert.store import Store, Weight, own_type, shape_of, turned, type_of
from compressor.graph.operators import operator
from compressor.graph.values import input_of, sole_reader
from compressor.types.tensors import Array

_BYTE_OFFSET = 128  # between codes of uint8 and of int8
# Operators of whose inputs the first alone counts: their result tells its own shape and type.
_SHAPED = frozenset({"Reshape", "Expand", "Squeeze", "Unsqueeze", "Resize", "CastLike"})
_BOUNDS: Mapping[tuple[float, float], str] = {(0, 6): "RELU6", (-1, 1): "RELU_N1_TO_1"}
FIXED_SAMPLES = (
    "give the inputs a fixed number of samples, such as 1: a network in Python by model.inputs, an "
    "ONNX file where it is exported"
)
"""The remedy where what a node computes depends on how many samples there are."""

Lowered = Callable[["Call"], None]


@dataclass(frozen=True)
class Rule:
    """How one ONNX operator is written.

    Attributes:
        lower: emits what computes it.
        integer: it can read and write codes.
        fuses: it takes in the activation that follows it.
    """

    lower: Lowered
    integer: bool = False
    fuses: bool = False


@dataclass
class Call:
    """One operator on its way into the file.

    Attributes:
        codes: what its result is quantized with, if it computes with integers.
        activation: what it takes in of the operator that follows it, in the schema's words.
        result: the value that is there in the end.
    """

    graph: Store
    node: ir.Node
    codes: Quantization | None
    activation: str
    result: ir.Value

    @property
    def fused(self) -> int:
        """The number of the activation in the schema."""
        return int(getattr(schema.ActivationFunctionType, self.activation))

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape in ONNX's order, -1 for samples."""
        return shape_of(self.result)

    def operand(self, index: int, last: bool | None = None) -> Tensor:
        """Return an input; ``last`` asks for a layout, ``None`` takes it as it is."""
        value = self.node.inputs[index]
        assert value is not None
        if self.codes is not None:
            return self.graph.codes(value, last)
        return self.graph.tensor(value, last)

    def has(self, index: int) -> bool:
        """Whether an optional input is given."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def constant(self, index: int) -> Array | None:
        """Return a constant input's value; ``None`` where it is left out.

        Raises:
            SpecError: it is computed.
        """
        return self.weight(index).floats if self.has(index) else None

    def weight(self, index: int) -> Weight:
        """Return a constant input, with its codes if it has any; raises as :meth:`constant`."""
        value = self.node.inputs[index]
        assert value is not None
        weight = self.graph.weight(value)
        if weight is None:
            raise self.refusal(f"its input {value.name!r} is computed, and LiteRT wants a constant")
        return weight

    def ints(self, name: str, default: Sequence[int] = ()) -> list[int]:
        """Return an attribute of several integers."""
        attribute = self.node.attributes.get(name)
        return list(default) if attribute is None else [int(x) for x in attribute.as_ints()]

    def refusal(self, problem: str, remedy: str = "") -> SpecError:
        """Return the error that names this node."""
        remedy = remedy or "export onnx for ONNX Runtime instead, or change the network there"
        return SpecError(f"node {self.node.name!r} ({self.node.op_type})", problem, remedy)

    def give(
        self,
        name: str,
        operands: Sequence[Tensor | None],
        options: Any = None,
        *,
        last: bool = False,
        written: Quantization | None = None,
    ) -> None:
        """Emit the operator that writes the result.

        Args:
            last: the result's layout.
            written: what the operator quantizes its result with, if it cannot do so otherwise;
                whoever reads it takes that, since nothing is won by quantizing twice.
        """
        graph, result = self.graph, self.result
        at = turned(self.shape) if last else self.shape
        if self.codes is None:
            first = operands[0]
            moved = first.quantization if first is not None else None
            dtype = type_of(result) if moved is None else "int8"
            made = graph.emit(name, operands, at, dtype, options, last, result.name, moved)
        else:
            codes = written or self.codes
            made = graph.emit(name, operands, at, "int8", options, last, result.name, codes)
        graph.keep(result, made)


@dataclass
class Lowering:
    """A graph on its way into a file.

    Args:
        rules: how operators are written, by their names.
    """

    store: Store
    rules: Mapping[str, Rule]
    _done: set[ir.Node] = field(default_factory=set)

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Lower everything that the outputs depend on; return inputs and outputs.

        Raises:
            SpecError: LiteRT has no operator for a node, or cannot take a value's shape.
        """
        graph = self.store.model.graph
        inputs = []
        for value in graph.inputs:
            inputs.append(
                self.store.file.tensor(value.name or "", shape_of(value), own_type(value))
            )
            self.store.keep(value, self.store.typed(inputs[-1], type_of(value)))
        live = _live(graph)
        for node in graph:
            if node in live and node not in self._done:
                self._lower(node)
        outputs: list[Tensor] = []
        for value in graph.outputs:
            tensor = self.store.typed(self.store.tensor(value, last=False), own_type(value))
            if tensor.constant or tensor.index in {x.index for x in (*inputs, *outputs)}:
                tensor = self.store.reshaped(tensor, tensor.shape)
            self.store.file.rename(tensor, value.name or "")
            outputs.append(tensor)
        return inputs, outputs

    def _lower(self, node: ir.Node) -> None:
        row = operator(node)
        if row.quantizes:
            self._quantize(node)
            return
        if row.dequantizes or self.store.weight(node.outputs[0]) is not None:
            return  # read where they are needed
        rule = self.rules.get(node.op_type) if row.name or node.domain in ("", "ai.onnx") else None
        plain = Call(self.store, node, None, "NONE", node.outputs[0])
        if rule is None:
            raise plain.refusal(
                f"LiteRT has no operator for {node.domain or 'ONNX'}'s {node.op_type}",
                FIXED_SAMPLES if row.family == "shape" else "",
            )
        for value in node.outputs:
            if value.uses() or value.is_graph_output():
                shape_of(value)
        rule.lower(self._call(node, rule))

    def _call(self, node: ir.Node, rule: Rule) -> Call:
        """Choose whether a node computes with codes, and what it takes in."""
        result = node.outputs[0]
        fused, after = "NONE", sole_reader(result) if rule.fuses else None
        activation = self._activation(after)
        if after is not None and activation:
            fused, result = activation, after.outputs[0]
        plain = Call(self.store, node, None, fused, result)
        moved = operator(node).moves and self.store.holds_codes(node.inputs[0])
        if moved:  # codes themselves
            return plain
        quantizers = self._quantizers(result)
        bounded = None
        if not quantizers and fused == "NONE":
            bounded = sole_reader(result)
            if operator(bounded).family == "unary" and operator(bounded).name in ("Relu", "Clip"):
                assert bounded is not None
                quantizers = self._quantizers(bounded.outputs[0])
        if rule.integer and quantizers and self._reads_codes(node):
            codes = self._quantization(quantizers[0])
            taken = bounded is None or self._implied(bounded, codes)
            if taken and self._multiplies(node, codes):
                self._done.update(quantizers)
                if bounded is not None:
                    self._done.add(bounded)
                if after is not None and activation:
                    self._done.add(after)
                made = quantizers[0].outputs[0]
                call = Call(self.store, node, codes, fused, made)
                for other in quantizers[1:]:
                    self.store.alias(other.outputs[0], made)
                return call
        if after is not None and activation:
            self._done.add(after)
        return plain

    def _activation(self, node: ir.Node | None) -> str:
        """Return the name of an activation that operators can take in; empty for other nodes."""
        if node is None or operator(node).name not in ("Relu", "Clip"):
            return ""
        if node.op_type == "Relu":
            return "RELU"
        return _BOUNDS.get(bounds(self.store, node), "")

    def _implied(self, clip: ir.Node, codes: Quantization) -> bool:
        """Whether codes cannot represent the values that a Clip removes."""
        low, high = bounds(self.store, clip)
        step = float(codes.scale.reshape(-1)[0])
        least, greatest = (
            step * (end - codes.zero_point) for end in (-_BYTE_OFFSET, _BYTE_OFFSET - 1)
        )
        slack = step / 2
        return self.store.planned or (low <= least + slack and high >= greatest - slack)

    def _quantizers(self, value: ir.Value) -> list[ir.Node]:
        """Return what quantizes a value, if nothing else reads it and all do so alike."""
        if value.is_graph_output():
            return []
        readers = [use.node for use in value.uses()]
        if not all(operator(x).quantizes for x in readers):
            return []
        alike = [self._quantization(x) for x in readers]
        return readers if all(x.same_as(alike[0]) for x in alike[1:]) else []

    def _reads_codes(self, node: ir.Node) -> bool:
        """Whether a node computes with codes alone: activations, or one and a weight."""
        row, given = operator(node), [v for v in node.inputs if v is not None]
        read = given if row.family in ("binary", "concat") else given[:1]
        if row.layer and len(given) > row.weight:
            weight = self.store.weight(given[row.weight])
            if weight is None:
                read = given
            elif weight.scale is None:
                return False
        return all(
            operator(v.producer()).dequantizes and self.store.weight(v) is None for v in read
        )

    def _multiplies(self, node: ir.Node, codes: Quantization) -> bool:
        """Whether the kernel of a layer takes its scales; there is none to ask about elsewhere."""
        row, given = operator(node), [v for v in node.inputs if v is not None]
        multiplies = row.layer and len(given) > row.weight
        weight = self.store.weight(given[row.weight]) if multiplies else None
        if weight is None or weight.scale is None or self.store.planned:
            return True
        source = given[0].producer()
        assert source is not None
        read = self._quantization(source).scale
        return kernel_multiplies(read.max(), weight.scale.max(), codes.scale.min())

    def _quantization(self, node: ir.Node) -> Quantization:
        """Return what a QuantizeLinear or DequantizeLinear of activations does, for int8."""
        scale = self.store.array(node.inputs[1]).astype(np.float32).reshape(-1)
        if self.store.planned and not scale.any():  # not known yet
            scale = np.ones_like(scale)
        codes = node.inputs[0] if operator(node).dequantizes else node.outputs[0]
        zero = input_of(node, 2)
        offset = 0 if zero is None else int(self.store.array(zero).reshape(-1)[0])
        unsigned = codes is not None and codes.dtype != ir.DataType.INT8
        if zero is not None and zero.dtype is not None:
            unsigned = zero.dtype == ir.DataType.UINT8
        return Quantization(scale, offset - _BYTE_OFFSET * unsigned)

    def _quantize(self, node: ir.Node) -> None:
        value = node.inputs[0]
        assert value is not None
        source = self.store.tensor(value)
        shape = source.shape
        name = node.outputs[0].name
        made = self.store.emit(
            "QUANTIZE", [source], shape, "int8", None, source.last, name, self._quantization(node)
        )
        self.store.keep(node.outputs[0], made)


def _live(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that outputs depend on, but for those that compute known shapes."""
    live: set[ir.Node] = set()
    waiting = [value.producer() for value in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in live:
            continue
        live.add(node)
        read = node.inputs[:1] if node.op_type in _SHAPED else node.inputs
        waiting.extend(value.producer() for value in read if value is not None)
    return live


def bounds(store: Store, clip: ir.Node) -> tuple[float, float]:
    """Return the least and the greatest value that a Clip, or a Relu, lets through."""
    if clip.op_type == "Relu":
        return 0.0, np.inf
    found = []
    for place, key, default in ((1, "min", -np.inf), (2, "max", np.inf)):
        given = input_of(clip, place)
        if given is not None:
            weight = store.weight(given)
            found.append(np.nan if weight is None else float(weight.floats))
        else:
            attribute = clip.attributes.get(key)
            found.append(default if attribute is None else float(attribute.as_float()))
    return found[0], found[1]
