"""Write a LiteRT file: tensors, operators and buffers of one graph in a flatbuffer.

The layout is that of ``schema.fbs`` in LiteRT's repository, by the classes that its package has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from compressor.types.tensors import Array

_IDENTIFIER = b"TFL3"
_VERSION = 3  # of the format
_ALIGNMENT = 16  # bytes, at which the schema wants buffers to begin
_SIGNATURE = "serving_default"
_CODES_BEFORE_EXTENSION = 127  # operators have a second field from there on

# The version of an operator from which on runtimes know it with int8 inputs; 1 where not named.
_WITH_CODES: Mapping[str, int] = {
    "CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 12, "TRANSPOSE_CONV": 3,
    "BATCH_MATMUL": 4, "ADD": 2, "SUB": 2, "MUL": 2, "AVERAGE_POOL_2D": 2, "MAX_POOL_2D": 2,
    "MEAN": 2, "CONCATENATION": 2, "LEAKY_RELU": 2, "LOGISTIC": 2, "TANH": 2, "SOFTMAX": 2,
    "PAD": 2, "PADV2": 2, "RESHAPE": 1, "TRANSPOSE": 2, "STRIDED_SLICE": 2, "DEQUANTIZE": 5,
    "QUANTIZE": 2, "RELU": 2, "RELU6": 2, "MAXIMUM": 2, "MINIMUM": 2, "RESIZE_BILINEAR": 2,
    "RESIZE_NEAREST_NEIGHBOR": 2, "REDUCE_MAX": 2, "GATHER": 2, "SPLIT_V": 2, "GELU": 2,
    "BROADCAST_TO": 2,
}  # fmt: skip
_FLOAT_VERSIONS: Mapping[str, int] = {"TRANSPOSE_CONV": 3, "FULLY_CONNECTED": 5, "BROADCAST_TO": 2}


@dataclass(frozen=True, eq=False)
class Quantization:
    """What integers of a tensor stand for: ``scale * (code - zero_point)``.

    Attributes:
        scale: float32 ``[1]``, or one for each position along ``axis``.
        zero_point: the code of zero, the same for all positions.
    """

    scale: Array
    zero_point: int = 0
    axis: int = 0

    def same_as(self, other: Quantization) -> bool:
        """Whether codes of one mean the same under the other."""
        return self.zero_point == other.zero_point and np.array_equal(self.scale, other.scale)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the file.

    Attributes:
        shape: lengths of its axes; -1 for samples, whose number is chosen when the file is run.
        dtype: numpy's name of its type.
        last: its channels are the last axis, and not the second as in ONNX.
        constant: its value is stored in the file.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    last: bool = False
    quantization: Quantization | None = None
    constant: bool = False


@dataclass
class FileBuilder:
    """Collects a graph, and returns it as the bytes of a file."""

    _tensors: list[Any] = field(default_factory=list)
    _buffers: list[Any] = field(default_factory=lambda: [schema.BufferT()])
    _operators: list[Any] = field(default_factory=list)
    _codes: dict[tuple[int, int], int] = field(default_factory=dict)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        *,
        data: Array | None = None,
        quantization: Quantization | None = None,
        last: bool = False,
    ) -> Tensor:
        """Add a tensor.

        Args:
            data: its value, in ``shape``; ``None`` for what is computed.
        """
        made = schema.TensorT()
        made.name = name
        made.shape = np.array([1 if n < 0 else n for n in shape], np.int32)
        made.hasRank = True
        if any(n < 0 for n in shape):
            made.shapeSignature = np.array(shape, np.int32)
        made.type = getattr(schema.TensorType, dtype.upper())
        made.buffer = 0
        if data is not None:
            made.buffer = len(self._buffers)
            content = _AlignedBuffer()
            content.data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            self._buffers.append(content)
        if quantization is not None:
            made.quantization = _parameters(quantization)
        self._tensors.append(made)
        index = len(self._tensors) - 1
        return Tensor(index, tuple(shape), dtype, last, quantization, data is not None)

    def rename(self, tensor: Tensor, name: str) -> None:
        """Give a tensor the name by which applications find it."""
        self._tensors[tensor.index].name = name

    def operator(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        options: Any = None,
    ) -> None:
        """Add an operator after those that are there.

        Args:
            name: as in the schema, such as ``CONV_2D``.
            options: an object of the schema whose name ends in ``OptionsT``.
        """
        reads_codes = any(x is not None and x.dtype == "int8" for x in inputs)
        version = (_WITH_CODES if reads_codes else _FLOAT_VERSIONS).get(name, 1)
        key = (getattr(schema.BuiltinOperator, name), version)
        made = schema.OperatorT()
        made.opcodeIndex = self._codes.setdefault(key, len(self._codes))
        made.inputs = np.array([-1 if x is None else x.index for x in inputs], np.int32)
        made.outputs = np.array([x.index for x in outputs], np.int32)
        if options is not None:
            made.builtinOptions = options
            made.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
        self._operators.append(made)

    def content(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        description: str,
        notes: Mapping[str, bytes],
    ) -> bytes:
        """Return the file.

        Args:
            description: what wrote it.
            notes: metadata by name.
        """
        graph = schema.SubGraphT()
        graph.name = "main"
        graph.tensors, graph.operators = self._tensors, self._operators
        graph.inputs = np.array([x.index for x in inputs], np.int32)
        graph.outputs = np.array([x.index for x in outputs], np.int32)
        model = schema.ModelT()
        model.version, model.description = _VERSION, description
        model.operatorCodes = [_operator_code(*key) for key in self._codes]
        model.subgraphs, model.buffers = [graph], self._buffers
        model.signatureDefs = [self._signature(inputs, outputs)]
        model.metadata = []
        for name, text in notes.items():
            note, buffer = schema.MetadataT(), _AlignedBuffer()
            note.name, note.buffer = name, len(model.buffers)
            buffer.data = np.frombuffer(text, np.uint8)
            model.buffers = [*model.buffers, buffer]
            model.metadata.append(note)
        builder = flatbuffers.Builder(
            sum(len(b.data) + _ALIGNMENT for b in model.buffers if b.data is not None) + (1 << 16)
        )
        builder.Finish(model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    def _signature(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        made = schema.SignatureDefT()
        made.signatureKey = _SIGNATURE
        made.inputs = [self._entry(x) for x in inputs]
        made.outputs = [self._entry(x) for x in outputs]
        return made

    def _entry(self, tensor: Tensor) -> Any:
        made = schema.TensorMapT()
        made.name, made.tensorIndex = self._tensors[tensor.index].name, tensor.index
        return made


class _AlignedBuffer(schema.BufferT):  # type: ignore[misc]
    """A buffer that begins where the schema demands it, for runtimes that map the file."""

    def Pack(self, builder: Any) -> Any:  # noqa: N802 (the name is the library's)
        """Write it."""
        content = self.data.tobytes()
        builder.StartVector(1, len(content), _ALIGNMENT)
        builder.head -= len(content)
        builder.Bytes[builder.head : builder.head + len(content)] = content
        vector = builder.EndVector()
        schema.BufferStart(builder)
        schema.BufferAddData(builder, vector)
        return schema.BufferEnd(builder)


def _parameters(quantization: Quantization) -> Any:
    made = schema.QuantizationParametersT()
    made.scale = np.asarray(quantization.scale, np.float32).reshape(-1)
    made.zeroPoint = np.full(made.scale.size, quantization.zero_point, np.int64)
    made.quantizedDimension = quantization.axis
    return made


def _operator_code(code: int, version: int) -> Any:
    made = schema.OperatorCodeT()
    made.deprecatedBuiltinCode = min(code, _CODES_BEFORE_EXTENSION)
    made.builtinCode, made.version = code, version
    return made
