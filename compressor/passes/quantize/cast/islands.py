"""Which operators of a graph stay in float32 when the rest becomes 16 bits wide, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import isfinite

import numpy as np
import onnx
import onnx_ir as ir

from compressor.graph.editing import inner_nodes
from compressor.graph.inference import infer_shapes
from compressor.graph.layers import layer_of, layers_of
from compressor.graph.operators import Float16, operator, operator_named
from compressor.graph.values import all_nodes, constant_of
from compressor.types.tensors import Array

HALF_MAX = float(np.finfo(np.float16).max)

PLACE = "computes places, not signals"
CODES = "works with integer codes"
_REASONS: Mapping[Float16, str] = {
    "sum": "adds up many terms",
    "range": "its values span more than float16 does",
    "angle": "reduces its argument by a period",
    "place": PLACE,
    "choice": "equal values would choose another index",
    "codes": CODES,
    "typed": "an attribute sets its type",
    "list": "works with a sequence of tensors",
}


class FloatIslands:
    """Finds the operators of a graph that stay in float32, branches and bodies included.

    What control flow reads and writes stays float32, and so do the inputs and outputs of branches
    and bodies; values that they read from outside may cross the border in either type.

    Args:
        model: read only.
        skipped: why the readers of these weights stay in float32.
        keep_io: graph inputs and outputs stay in float32.
        evaluate: read constants too, and keep what would overflow or vanish in float16; in
            bfloat16, whose range is that of float32, nothing does.
        narrow: the type of the rest, float16 or bfloat16.

    Attributes:
        reasons: why a node stays in float32.
        types: element types of tensors, as far as they are known.
    """

    def __init__(
        self,
        model: ir.Model,
        skipped: Mapping[str, str],
        *,
        keep_io: bool,
        evaluate: bool,
        narrow: ir.DataType = ir.DataType.FLOAT16,
    ):
        self.model = model
        self.narrow = narrow
        self.keep_io = keep_io
        self.types = value_types(model)
        self.reasons: dict[ir.Node, str] = {}
        self._opset = model.opset_imports.get("", 1)
        self._nodes = tuple(all_nodes(model.graph))
        for node in self._nodes:
            reason = self._of_layer(node, skipped) or self._of_operator(node)
            if reason:
                self._keep(node, reason)
        self._keep_places()
        if evaluate and narrow == ir.DataType.FLOAT16:
            self._keep_extremes()
        self._keep_enclosed()

    def is_float(self, value: ir.Value | None) -> bool:
        """Whether a value is a float32 tensor."""
        return value is not None and self.types.get(value) == ir.DataType.FLOAT

    def is_half(self, node: ir.Node) -> bool:
        """Whether a node is to compute in the narrow type."""
        return self.computes(node) and node not in self.reasons and not is_transparent(node)

    def computes(self, node: ir.Node) -> bool:
        """Whether a node reads or writes float32 tensors."""
        return any(self.is_float(v) for v in (*node.inputs, *node.outputs))

    def half_outputs(self, node: ir.Node) -> list[ir.Value]:
        """Return the float32 outputs of a half node whose type is that of a float32 input."""
        if operator(node).moves == "type":
            return [v for v in node.outputs if self.is_float(v)]
        count = len(node.outputs)
        bound = bound_outputs(node.op_type, self._opset, self._float_positions(node), count)
        return [node.outputs[i] for i in bound if self.is_float(node.outputs[i])]

    def leaves_as_float(self, value: ir.Value) -> bool:
        """Whether a value is an output that stays float32: of a body, or with ``keep_io``."""
        maker = value.producer()
        main = maker is None or maker.graph is self.model.graph
        return value.is_graph_output() and (self.keep_io or not main)

    def _is_real(self, value: ir.Value) -> bool:
        kind = self.types.get(value)
        return kind is None or kind.is_floating_point()

    def _float_positions(self, node: ir.Node) -> list[int]:
        return [i for i, value in enumerate(node.inputs) if self.is_float(value)]

    def _keep(self, node: ir.Node, reason: str) -> None:
        self.reasons.setdefault(node, reason)

    def _of_layer(self, node: ir.Node, skipped: Mapping[str, str]) -> str:
        skip = next((x.weight for x in layers_of(node) if x.weight in skipped), None)
        if skip is not None:
            return skipped[skip]
        if operator(node).arithmetic != "+":
            return ""
        # The bias of a product without one of its own belongs to it.
        product = next((v.producer() for v in node.inputs if v is not None and v.producer()), None)
        owner = layer_of(product) if operator(product).bias_is_separate and product else None
        alone = any(v is not None and v.is_initializer() for v in node.inputs)
        return skipped.get(owner.weight, "") if owner is not None and alone else ""

    def _of_operator(self, node: ir.Node) -> str:
        if inner_nodes(node):
            return "holds a subgraph"
        inner = node.graph is not self.model.graph
        if inner and any(v is not None and v not in self.types for v in node.inputs):
            return "reads a value of unknown type"
        if node.domain not in ("", "ai.onnx"):
            return f"is an operator of {node.domain}"
        reason = float32_reason(node.op_type)
        if reason or self._serves_codes(node):
            return reason or CODES
        positions = self._float_positions(node)
        name = self.narrow.name.lower()
        if not is_transparent(node) and not admits(name, node.op_type, self._opset, positions):
            return f"has no {name} form in opset {self._opset}"
        return ""

    def _serves_codes(self, node: ir.Node) -> bool:
        """Whether a runtime fuses the node with quantization around it."""
        producers = [v.producer() for v in node.inputs if v is not None]
        if any(operator(p).dequantizes for p in producers):
            return True
        if any(operator(use.node).quantizes for v in node.outputs for use in v.uses()):
            return True
        if not operator(node).decodes:
            return False
        scaled = [p for p in producers if p is not None and operator(p).decodes]
        before = [v.producer() for p in scaled for v in p.inputs if v is not None]
        return any(operator(p).unscaled for p in (*producers, *before))

    def _keep_places(self) -> None:
        """Keep what is computed from integers alone: positions, angles, masks."""
        constants = set(_initializers(self.model))
        places: set[ir.Value] = set()
        for node in self._nodes:
            inputs = [v for v in node.inputs if v is not None]
            if all(v in constants for v in inputs):
                constants.update(node.outputs)
                continue
            if not any(self.is_float(v) for v in node.outputs) or layer_of(node) is not None:
                continue
            if all(v in constants or v in places for v in inputs if self._is_real(v)):
                places.update(node.outputs)
                self._keep(node, PLACE)

    def _keep_extremes(self) -> None:
        """Keep the readers of constants that float16 cannot hold, and what passes them on."""
        large: list[ir.Node] = []
        for value in _initializers(self.model):
            if not self.is_float(value):
                continue
            tensor = constant_of(value)
            problem = "" if tensor is None else extreme(np.asarray(tensor.numpy()))
            if not problem:
                continue
            for node in self._float_readers(value):
                layer = layer_of(node)
                weighs = layer is not None and layer.weight == value.name
                self._keep(node, f"{'its weight' if weighs else 'a constant'} {problem}")
                if layer is None and "above" in problem:
                    large.append(node)
        passed = set(large)
        for node in large:
            row = operator_named(node.op_type)
            if row.bounded or row.float16 != "cheap":
                continue
            readers = (reader for value in node.outputs for reader in self._float_readers(value))
            for reader in readers:
                if reader not in passed:
                    self._keep(reader, "it may receive values above float16's")
                    passed.add(reader)
                    large.append(reader)

    def _float_readers(self, value: ir.Value) -> list[ir.Node]:
        """Nodes that compute with a value, transposes of it included."""
        readers: list[ir.Node] = []
        for use in value.uses():
            node = use.node
            if is_transparent(node):
                continue
            readers.append(node)
            views = operator(node).moves in ("same", "order", "shape")
            if value.is_initializer() and views:
                readers.extend(self._float_readers(node.outputs[0]))
        return readers

    def _keep_enclosed(self) -> None:
        """Keep groups of cheap operators that have only float32 around them."""
        seen: set[ir.Node] = set()
        for node in self._nodes:
            if node in seen or not self._follows(node):
                continue
            group, floats, halves = [node], 0, 0
            seen.add(node)
            for member in group:
                for other in self._around(member):
                    if other is None or other in self.reasons:
                        floats += 1
                    elif self._follows(other):
                        if other not in seen:
                            seen.add(other)
                            group.append(other)
                    else:
                        halves += 1
            if floats and not halves:
                for member in group:
                    self._keep(member, "lies between float32 operators")

    def _follows(self, node: ir.Node) -> bool:
        row = operator_named(node.op_type)
        layer = row.is_table and layer_of(node) is not None
        return row.float16 == "cheap" and self.is_half(node) and not layer

    def _around(self, node: ir.Node) -> Iterator[ir.Node | None]:
        """Yield what a node exchanges float32 tensors with; ``None`` is float32 for certain."""
        for value in node.inputs:
            if value is None or not self.is_float(value) or value.is_initializer():
                continue
            producer = value.producer()
            if producer is not None:
                yield producer
            elif self.keep_io or value.graph is not self.model.graph:
                yield None
        for value in node.outputs:
            if not self.is_float(value):
                continue
            if self.leaves_as_float(value):
                yield None
            for use in value.uses():
                if not is_transparent(use.node):
                    yield use.node


def is_transparent(node: ir.Node) -> bool:
    """Whether a node takes any type and gives none that depends on it."""
    if operator(node).moves == "type":
        return node.attributes.get_int("to", 0) != ir.DataType.FLOAT.value
    return operator(node).family == "shape"


def value_types(model: ir.Model) -> dict[ir.Value, ir.DataType]:
    """Return the element types of a model's tensors; inferred where none is noted."""
    inferred = model.clone()
    for value in _initializers(inferred):
        value.const_value = None  # inference would read small ones, and so compute lazy ones
    infer_shapes(inferred)
    types: dict[ir.Value, ir.DataType] = {}
    entering = [value for graph in model.graphs() for value in graph.inputs]
    for value in (*entering, *_initializers(model)):
        if value.dtype is not None and _is_tensor(value):
            types[value] = value.dtype
    for node, twin in zip(all_nodes(model.graph), all_nodes(inferred.graph), strict=True):
        entry = next((types[v] for v in node.inputs if v in types), None)
        for value, other in zip(node.outputs, twin.outputs, strict=True):
            # Operators outside the standard have no inference; most keep their first input's type.
            kind = value.dtype or other.dtype or entry
            if kind is not None and _is_tensor(value) and _is_tensor(other):
                types[value] = kind
    return types


def _initializers(model: ir.Model) -> list[ir.Value]:
    return [value for graph in model.graphs() for value in graph.initializers.values()]


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def float32_reason(op_type: str) -> str:
    """Return why an operator stays in float32 wherever it is; empty if it need not.

    Normalizations that compute their statistics in float32 whatever their inputs are, such as
    LayerNormalization by its ``stash_type``, need not.
    """
    return _REASONS.get(operator_named(op_type).float16, "")


def admits(dtype: str, op_type: str, opset: int, positions: Sequence[int]) -> bool:
    """Whether an operator of the default domain takes an element type at these inputs."""
    schema = _schema(op_type, opset)
    if schema is None:
        return False
    kinds = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    types = (_formal(schema.inputs, position).type_str for position in positions)
    return all(f"tensor({dtype})" in kinds.get(kind, {kind}) for kind in types)


def bound_outputs(op_type: str, opset: int, positions: Sequence[int], count: int) -> list[int]:
    """Return which of ``count`` outputs have the type of an input at one of these positions."""
    schema = _schema(op_type, opset)
    if schema is None:
        return []
    bound = {_formal(schema.inputs, position).type_str for position in positions}
    return [i for i in range(count) if _formal(schema.outputs, i).type_str in bound]


def extreme(array: Array) -> str:
    """Return what float16 cannot hold of a constant; empty if nothing matters.

    Values that vanish matter only where all of a constant do, such as an epsilon.
    """
    if not array.size:
        return ""
    low, high = float(array.min()), float(array.max())
    if not (isfinite(low) and isfinite(high)):
        array = array[np.isfinite(array)]
        return extreme(array)
    largest = max(-low, high)
    if largest > HALF_MAX:
        return f"reaches {largest:.3g}, above {HALF_MAX:.0f}"
    if largest != 0 and np.float16(largest) == 0:
        return f"is {'' if array.size == 1 else 'at most '}{largest:.3g}, 0 in float16"
    return ""


@cache
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def _formal(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int
) -> onnx.defs.OpSchema.FormalParameter:
    """Return the parameter at a position; the last one may stand for any number."""
    return parameters[min(index, len(parameters) - 1)]
