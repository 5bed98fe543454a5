"""Which layers are meant to be computed with codes, and whether the engine does so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import DataType

from compressor.errors import ArtifactError, listed
from compressor.exporters.tensorrt.layer_report import EngineLayer
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_of, maker_behind

_CODES = {
    DataType.INT8: "int8",
    DataType.UINT8: "uint8",
    DataType.INT4: "int4",
    DataType.FLOAT8E4M3FN: "fp8",
    DataType.FLOAT4E2M1: "fp4",
}


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer whose weight is stored as codes.

    Attributes:
        layer: its name, such as ``conv1``.
        node: name of its ONNX node.
        stored: element type of the codes.
        computed: the type that it is meant to be computed with; empty where activations are
            float.
    """

    layer: str
    node: str
    stored: str
    computed: str


@dataclass(frozen=True)
class Placed:
    """A quantized layer and what the engine made of it.

    Attributes:
        meant: the layer.
        found: the type that the engine computes it with; empty where it does not name the layer.
    """

    meant: QuantizedLayer
    found: str

    @property
    def ok(self) -> bool:
        """It is computed as it was meant to be."""
        return not self.meant.computed or self.found == self.meant.computed


def quantized_layers(model: ir.Model) -> tuple[QuantizedLayer, ...]:
    """Find the layers whose weight is stored as codes, in the order of execution.

    One is meant to be computed with codes where its other input is quantized too. Operators on
    single values are looked through there: one that stands between DequantizeLinear and the layer
    is a mistake that makes TensorRT compute in float.
    """
    names = {node: layer.name for layer, node in layers_with_nodes(model)}
    found = []
    for node in all_nodes(model.graph):
        if not operator(node).is_product or len(node.inputs) < 2:
            continue
        weight, other = node.inputs[1], node.inputs[0]
        codes = _codes(weight)
        if codes is None and operator(node).is_matmul:  # which may have its weight on the left
            codes, other = _codes(other), weight
        if codes is not None and codes.dtype in _CODES:
            stored = _CODES[codes.dtype]
            computed = stored if _activation_is_coded(other) else ""
            name = names.get(node) or (codes.name or "").removesuffix(".weight")
            found.append(QuantizedLayer(name, node.name or "", stored, computed))
    return tuple(found)


def place(layers: Sequence[QuantizedLayer], engine: Sequence[EngineLayer]) -> tuple[Placed, ...]:
    """Look each quantized layer up in the engine."""
    return tuple(Placed(layer, _found(layer, engine)) for layer in layers)


def check_placed(placed: Sequence[Placed], builder: str) -> None:
    """Raise where the engine computes a layer with another type than it was meant to.

    Raises:
        ArtifactError: naming the layers.
    """
    wrong = [entry for entry in placed if not entry.ok]
    if not wrong:
        return
    names = listed([entry.meant.layer for entry in wrong])
    kinds = sorted({entry.found or "another type" for entry in wrong})
    meant = sorted({entry.meant.computed for entry in wrong})
    many = len(wrong) > 1
    raise ArtifactError(
        f"the engine (builder {builder!r})",
        f"computes {'layers' if many else 'layer'} {names} in {' or '.join(kinds)}, not in "
        f"{' or '.join(meant)}",
        "QuantizeLinear and DequantizeLinear must stand right before a layer, with one scale for "
        "its input and one for each of its output channels; quantize the float model here, or "
        "leave these layers out with rules under layers",
    )


def _codes(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the codes that a weight is made of; views and scalings are seen through.

    ``None`` where it is made of none.
    """
    node = maker_behind(value, "DequantizeLinear", through=_scaled)
    return None if node is None else constant_of(node.inputs[0])


def _activation_is_coded(value: ir.Value | None) -> bool:
    node = maker_behind(value, "DequantizeLinear", "Concat", through=_changed_singly)
    if operator(node).family == "concat" and node is not None:
        return all(_activation_is_coded(part) for part in node.inputs)
    return node is not None


def _scaled(node: ir.Node) -> ir.Value | None:
    """Return what a node shows in another form, or combines with a constant."""
    row = operator(node)
    if row.moves in ("same", "type", "shape", "order"):
        return node.inputs[0]
    if row.family != "arithmetic":
        return None
    varying = [value for value in node.inputs if value is not None and constant_of(value) is None]
    return varying[0] if len(varying) == 1 else None


def _changed_singly(node: ir.Node) -> ir.Value | None:
    """Return the input whose values a node moves, averages or changes one by one."""
    row = operator(node)
    return node.inputs[0] if row.moves or row.between_codes else _scaled(node)


def _found(layer: QuantizedLayer, engine: Sequence[EngineLayer]) -> str:
    """Return the type that a node's product is computed with.

    Layers that only scale, round or move what goes in and out name the node as well.
    """
    types = list(dict.fromkeys(_types(layer.node, engine)))
    if layer.computed in types:
        return layer.computed
    return types[0] if types else ""


def _types(node: str, engine: Sequence[EngineLayer]) -> Iterator[str]:
    for row in engine:
        if node in row.nodes and row.multiplies:
            yield row.precision
