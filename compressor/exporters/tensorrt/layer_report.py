"""Read TensorRT's report of an engine's layers.

The report is text. Each layer is one entry of fields, ``Name: .., LayerType: .., Inputs: [..]`` and
so on, in which tensors stand in braces. ``Metadata`` names the ONNX nodes that a layer came from.
See "Engine Inspector" in NVIDIA's developer guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compressor.errors import ArtifactError

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
_PRODUCTS = frozenset({"Fc", "Gemm", "Corr", "Conv", "Deco"})
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


@dataclass(frozen=True)
class EngineTensor:
    """What a layer reads or writes; dynamic dimensions are -1."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        name: TensorRT's name for it.
        type: TensorRT's kind of layer.
        nodes: the ONNX nodes that it came from.
        inputs: what it reads of other layers.
        constants: its weights.
        outputs: what it writes.
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
        """It may be a product with weights, and is not only what stands around one."""
        return self.type not in _POINTWISE


def read_layers(report: str, nodes: Sequence[str]) -> tuple[EngineLayer, ...]:
    """Return the layers of an engine.

    Args:
        report: what TensorRT says of it.
        nodes: the names of all ONNX nodes; each has another.

    Raises:
        ArtifactError: it is not in the form that is known.
    """
    layers = tuple(_layer(entry, nodes) for entry in _entries(report))
    if not layers:
        raise ArtifactError(
            "TensorRT",
            f"reports the engine's layers in a form that is not known ({report[:80]!r})",
            "report it, with the version of TensorRT",
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
    found = re.search(_LIST.format(field), entry)
    if found is None:
        return ()
    return tuple(
        EngineTensor(
            tensor["name"],
            tuple(int(d) for d in tensor["shape"].split(",") if d.strip()),
            _dtype(tensor["dtype"]),
        )
        for tensor in _TENSOR.finditer(found["body"])
    )


def _weights(entry: str) -> tuple[EngineTensor, ...]:
    """Read the weights of a layer that states their number only."""
    found = _WEIGHTS.search(entry)
    if found is None:
        return ()
    return (EngineTensor("weights", (int(found["count"]),), _dtype(found["dtype"])),)


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

    That is the type of what it reads, unless a fused layer's name says that this is cast before
    the product: then it is the type of what it writes. Of several types that are read, that of
    the weights counts: the others are added behind the product.
    """
    fused = _FUSED.search(name)
    words = _WORD.findall(fused[1]) if fused else []
    product = next((i for i, word in enumerate(words) if word in _PRODUCTS), len(words))
    read = {tensor.dtype for tensor in inputs}
    if product < len(words) and "Cast" in words[:product]:
        return outputs[0].dtype if outputs else ""
    if not read:
        return outputs[0].dtype if outputs else ""
    if len(read) > 1:
        read &= {tensor.dtype for tensor in constants}
    return read.pop() if len(read) == 1 else "mixed"


def _dtype(text: str) -> str:
    return next((known for word, known in _DTYPES if word in text), text.strip())
