"""Inspect LiteRT files; LiteRT's packages are not needed.

The numbers of fields, types and operators are those of ``schema.fbs`` in LiteRT's repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from compressor.exporters.flatbuffer import Flatbuffer, Table
from compressor.lab.inspect.contents import ModelContents
from compressor.lab.inspect.stored import Stored, described, elements, facts, mapped, scheme
from compressor.types.tensors import TensorSpec

_MARK = b"TFL3"
_KIND = "LiteRT file"
_TYPE_NAMES = """
float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64
resource variant uint32 uint16 int4 bfloat16 int2 uint4 float8_e4m3fn float8_e5m2
"""
_TYPES = tuple(_TYPE_NAMES.split())
_CUSTOM = 32
_OPERATORS = """
ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE
EMBEDDING_LOOKUP FLOOR FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D
LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1
RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM
CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER BATCH_TO_SPACE_ND
SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE
BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM
CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT
SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT
SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND
LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE
RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL
REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE
MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5
SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM
CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND
HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE
ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL
GELU DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX
UNSORTED_SEGMENT_SUM ATAN2 UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT
"""
OPERATORS = tuple(_OPERATORS.split())
"""Names by number; the operators after these are of StableHLO, or newer."""


def inspect_litert(path: Path) -> ModelContents:
    """Describe a LiteRT file.

    Raises:
        ModelError: it is not a LiteRT file, or is cut or damaged.
    """
    with mapped(path, f"a {_KIND}") as data:
        model = Flatbuffer(data).root(_MARK)
        buffers = list(model.tables(4))
        graphs = list(model.tables(2))
        if not graphs:
            raise ValueError("it has no graph")

        @cache
        def content(index: int) -> memoryview:
            if not 0 <= index < len(buffers):
                raise ValueError(f"there is no buffer {index}")
            start, size = (buffers[index].number(field, "Q") for field in (1, 2))
            if start > 1 and size:  # large files have them after all else
                return model.file.part(start, size)
            return buffers[index].array(0, "u1").data

        codes = [_operator(code) for code in model.tables(1)]
        tensors = [list(graph.tables(0)) for graph in graphs]
        stored = [
            _stored(tensor, content(tensor.number(2, "I")))
            for held in tensors
            for tensor in held
            if tensor.number(2, "I") and len(content(tensor.number(2, "I")))
        ]
        operators = [
            codes[_index(operator.number(0, "I"), codes)]
            for graph in graphs
            for operator in graph.tables(3)
        ]
        ends = (list(_ends(graphs[0], field, tensors[0])) for field in (1, 2))
        graph = facts(operators, ends, producer=model.text(3))
        return described(_KIND, path, {path.name: len(data)}, stored, graph)


def _index(number: int, held: list[str]) -> int:
    if number >= len(held):
        raise ValueError(f"there is no operator code {number}")
    return number


def _operator(code: Table) -> str:
    number = max(code.number(0, "b"), code.number(3, "i"))
    if number == _CUSTOM:
        return f"CUSTOM {code.text(1)}"
    return OPERATORS[number] if 0 <= number < len(OPERATORS) else f"operator {number}"


def _type(tensor: Table) -> str:
    number = tensor.number(1, "b")
    if not 0 <= number < len(_TYPES):
        raise ValueError(f"tensor {tensor.text(3)!r} is of the unknown type {number}")
    return _TYPES[number]


def _stored(tensor: Table, data: memoryview) -> Stored:
    dtype, shape = _type(tensor), tuple(int(n) for n in tensor.array(0, "i4"))
    values = elements(data, dtype, shape)
    quantized, scales, zero = tensor.table(4), 0, 0
    if quantized is not None:
        zeros = quantized.array(3, "i8")
        scales, zero = quantized.array(2, "f4").size, int(zeros[0]) if zeros.size else 0
        if np.any(zeros != zero):  # each channel has its own
            values, zero = None, int(np.abs(zeros).max())
    return Stored(
        name=tensor.text(3),
        shape=shape,
        dtype=dtype,
        bytes=len(data),
        values=values,
        quantization=scheme(dtype, scales, zero) if scales else "",
        zero=zero,
    )


def _ends(graph: Table, field: int, tensors: list[Table]) -> Iterator[TensorSpec]:
    for index in graph.array(field, "i4"):
        if not 0 <= index < len(tensors):
            raise ValueError(f"there is no tensor {index}")
        tensor = tensors[index]
        shape = tensor.array(7, "i4") if tensor.at(7) else tensor.array(0, "i4")
        lengths = tuple(None if n < 0 else int(n) for n in shape)
        yield TensorSpec(tensor.text(3), lengths, _type(tensor))
