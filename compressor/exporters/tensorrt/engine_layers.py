"""An engine's layers: read from TensorRT's report, and compared with what was meant.

The report is text. Each layer is one entry of fields, ``Name: .., LayerType: .., Inputs: [..]`` and
so on, in which tensors stand in braces. ``Metadata`` names the ONNX nodes that a layer came from.
See "Engine Inspector" in NVIDIA's developer guide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import DataType

from compressor.errors import ArtifactError, listed
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, constant_of, maker_behind

_START = re.compile(r"(?m)^Name: (?=.*, LayerType: )")
_HEAD = re.compile(r"(?s)(?P<name>.*?), LayerType: (?P<type>[^,]*)")
_LIST = r"(?s), {}: \[(?P<body>|\s*\{{.*?\}})\](?=, [A-Z][A-Za-z]*: |\s*$)"
_TENSOR = re.compile(
    r"Name: (?P<name>.*?), (?:Location: [^,]*, )?Dimensions: \[(?P<shape>[-\d, ]*)\]"
    r".*?(?:Datatype|Format/Datatype): (?P<dtype>[^,}]*)",
    re.S,
)
_WEIGHTS = re.compile(r", Weights: \{\"Type\": \"(?P<dtype>\w+)\", \"Count\": (?P<count>\d+)\}")
_END = re.compile(r"(?m)^\s*$|^\s*(?:Bindings|I/O Tensors|Engine Metadata):")
_NODE = "[ONNX Layer: {}]"
_FUSED = re.compile(r"__myl_([A-Za-z]+)_myl")
_WORD = re.compile(r"[A-Z][a-z0-9]*")
_PRODUCT_WORDS = frozenset({"Fc", "Gemm", "Corr", "Conv", "Deco"})
_POINTWISE = frozenset({"kgen", "Reformat", "NoOp", "PointWise", "PointWiseV2", "Scale", "signal"})
_DTYPES = (
    ("BFloat16", "bfloat16"),
    ("BF16", "bfloat16"),
    ("FP8", "fp8"),
    ("FP4", "fp4"),
    ("UInt8", "uint8"),
    ("Int8", "int8"),
    ("INT8", "int8"),
    ("Int4", "int4"),
    ("INT4", "int4"),
    ("Half", "float16"),
    ("FP16", "float16"),
    ("Float", "float32"),
    ("FP32", "float32"),
    ("Int32", "int32"),
    ("INT32", "int32"),
    ("Int64", "int64"),
    ("Bool", "bool"),
)
_CODES = {
    DataType.INT8: "int8",
    DataType.UINT8: "uint8",
    DataType.INT4: "int4",
    DataType.FLOAT8E4M3FN: "fp8",
    DataType.FLOAT4E2M1: "fp4",
}


@dataclass(frozen=True)
class EngineTensor:
    """What a layer reads or writes; dynamic dimensions are -1."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine; name and type are TensorRT's.

    Attributes:
        precision: the element type that it computes with; empty where it reads nothing.
    """

    name: str
    type: str
    nodes: tuple[str, ...]
    inputs: tuple[EngineTensor, ...]
    constants: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    precision: str

    @property
    def multiplies(self) -> bool:
        """Whether it may be a product with weights, and not only what stands around one."""
        return self.type not in _POINTWISE


def read_layers(report: str, nodes: Sequence[str]) -> tuple[EngineLayer, ...]:
    """Return the layers of an engine.

    Args:
        nodes: the names of all ONNX nodes; each has another.

    Raises:
        ArtifactError: it has an unknown form.
    """
    layers = tuple(_layer(entry, nodes) for entry in _entries(report))
    if not layers:
        raise ArtifactError(
            "TensorRT",
            f"reports the engine's layers in an unknown form ({report[:80]!r})",
            "report it with the version of TensorRT",
        )
    return layers


def _entries(report: str) -> Iterator[str]:
    starts = [match.start() for match in _START.finditer(report)]
    for start, end in zip(starts, [*starts, len(report)][1:], strict=True):
        entry = report[start:end]
        if end == len(report):
            tail = _END.search(entry)
            entry = entry if tail is None else entry[: tail.start()]
        yield entry.rstrip().removeprefix("Name: ")


def _layer(entry: str, nodes: Sequence[str]) -> EngineLayer:
    head = _HEAD.match(entry)
    assert head is not None  # an entry starts where both fields follow
    inputs, outputs = _tensors(entry, "Inputs"), _tensors(entry, "Outputs")
    constants = _tensors(entry, "Constants") or _weights(entry)
    return EngineLayer(
        name=head["name"],
        type=head["type"],
        nodes=_nodes(entry, head["name"], nodes),
        inputs=inputs,
        constants=constants,
        outputs=outputs,
        precision=_precision(head["name"], inputs, constants, outputs),
    )


def _tensors(entry: str, field: str) -> tuple[EngineTensor, ...]:
    listed_tensors = re.search(_LIST.format(field), entry)
    if listed_tensors is None:
        return ()
    return tuple(
        EngineTensor(
            tensor["name"],
            tuple(int(d) for d in tensor["shape"].split(",") if d.strip()),
            _dtype(tensor["dtype"]),
        )
        for tensor in _TENSOR.finditer(listed_tensors["body"])
    )


def _weights(entry: str) -> tuple[EngineTensor, ...]:
    """Read the weights of a layer that states their number only."""
    weights = _WEIGHTS.search(entry)
    if weights is None:
        return ()
    return (EngineTensor("weights", (int(weights["count"]),), _dtype(weights["dtype"])),)


def _nodes(entry: str, name: str, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes named in the metadata; without any, those that the layer's name joins."""
    named = tuple(node for node in nodes if _NODE.format(node) in entry)
    if named:
        return named
    parts = set(name.split(" + "))
    return tuple(node for node in nodes if node in parts)


def _precision(
    name: str,
    inputs: Sequence[EngineTensor],
    constants: Sequence[EngineTensor],
    outputs: Sequence[EngineTensor],
) -> str:
    """Return the type that a layer multiplies in.

    That is the type it reads, unless a fused layer's name shows a cast before the product: then it
    is the type it writes. Of several types read, that of the weights counts: the others are added
    after the product.
    """
    fused = _FUSED.search(name)
    words = _WORD.findall(fused[1]) if fused else []
    product = next((i for i, word in enumerate(words) if word in _PRODUCT_WORDS), len(words))
    read = {tensor.dtype for tensor in inputs}
    if product < len(words) and "Cast" in words[:product]:
        return outputs[0].dtype if outputs else ""
    if not read:
        return outputs[0].dtype if outputs else ""
    if len(read) > 1:
        read &= {tensor.dtype for tensor in constants}
    return read.pop() if len(read) == 1 else "mixed"


def _dtype(text: str) -> str:
    return next((dtype for word, dtype in _DTYPES if word in text), text.strip())


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer whose weight is stored as codes, and its ONNX node, by name.

    ``stored`` is the codes' element type, ``computed`` the one that the layer is meant to be
    computed with; empty where activations are float.
    """

    layer: str
    node: str
    stored: str
    computed: str


@dataclass(frozen=True)
class Placed:
    """A quantized layer, and the type that the engine computes it with; empty where unknown."""

    meant: QuantizedLayer
    computed: str

    @property
    def ok(self) -> bool:
        """Whether it is computed as it was meant to be."""
        return not self.meant.computed or self.computed == self.meant.computed


def quantized_layers(model: ir.Model) -> tuple[QuantizedLayer, ...]:
    """Return the layers whose weight is stored as codes, in the order of execution.

    A layer is meant to be computed with codes where its other input is quantized too. Elementwise
    operators in between are ignored: such an operator between DequantizeLinear and the layer is a
    mistake that makes TensorRT compute in float.
    """
    names = {node: layer.name for layer, node in layers_with_nodes(model)}
    layers = []
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
            layers.append(QuantizedLayer(name, node.name or "", stored, computed))
    return tuple(layers)


def place(layers: Sequence[QuantizedLayer], engine: Sequence[EngineLayer]) -> tuple[Placed, ...]:
    """Look each quantized layer up in the engine."""
    return tuple(Placed(layer, _computed_type(layer, engine)) for layer in layers)


def check_placed(placed: Sequence[Placed], builder: str) -> None:
    """Check that the engine computes each layer with the type that it was meant to.

    Raises:
        ArtifactError: naming the layers.
    """
    wrong = [entry for entry in placed if not entry.ok]
    if not wrong:
        return
    names = listed([entry.meant.layer for entry in wrong])
    kinds = sorted({entry.computed or "another type" for entry in wrong})
    meant = sorted({entry.meant.computed for entry in wrong})
    many = len(wrong) > 1
    raise ArtifactError(
        f"the engine (builder {builder!r})",
        f"computes {'layers' if many else 'layer'} {names} in {' or '.join(kinds)}, not in "
        f"{' or '.join(meant)}",
        "leave these layers out with rules under layers if quantize-static chose them: the builder "
        "has no such kernel; in a file quantized elsewhere, "
        "QuantizeLinear and DequantizeLinear must stand right before a layer, with one scale for "
        "its input and one for each of its output channels",
    )


def _codes(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return a weight's codes, looking through views and scalings; ``None`` if it has none."""
    node = maker_behind(value, lambda row: row.dequantizes, _scaled)
    return None if node is None else constant_of(node.inputs[0])


def _activation_is_coded(value: ir.Value | None) -> bool:
    node = maker_behind(
        value, lambda row: row.dequantizes or row.family == "concat", _changed_singly
    )
    if node is not None and operator(node).family == "concat":
        return all(_activation_is_coded(part) for part in node.inputs)
    return node is not None


def _scaled(node: ir.Node) -> ir.Value | None:
    """Return what a node shows in another form, or combines with a constant."""
    row = operator(node)
    if row.moves in ("same", "type", "shape", "order"):
        return node.inputs[0]
    if not row.arithmetic:
        return None
    varying = [value for value in node.inputs if value is not None and constant_of(value) is None]
    return varying[0] if len(varying) == 1 else None


def _changed_singly(node: ir.Node) -> ir.Value | None:
    """Return the input whose values a node moves, averages or changes one by one."""
    row = operator(node)
    return node.inputs[0] if row.moves or row.between_codes else _scaled(node)


def _computed_type(layer: QuantizedLayer, engine: Sequence[EngineLayer]) -> str:
    """Return the type that a node's product is computed with.

    Layers that only scale, round or move what goes in and out name the node as well.
    """
    types = [row.precision for row in engine if layer.node in row.nodes and row.multiplies]
    if layer.computed in types:
        return layer.computed
    return types[0] if types else ""
