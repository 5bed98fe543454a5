"""Measure what a machine can do: products in several types, and bytes moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compressor.models.onnx.ort_runner import OrtRunner
from compressor.types.tensors import Array

_SIDE = 512
_SECONDS = 0.25
_LEAST_RUNS = 3
_ARRAYS = 3  # of a triad: two are read, one is written
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 192 << 20
_PRODUCTS: Mapping[str, Sequence[tuple[str, Any, Any]]] = {
    "float32": [("MatMul", np.float32, np.float32)],
    "float16": [("MatMul", np.float16, np.float16)],
    # Which of the two has a fast kernel depends on the processor.
    "int8": [("MatMulInteger", np.uint8, np.int8), ("MatMulInteger", np.int8, np.int8)],
}


@dataclass(frozen=True)
class Peaks:
    """What this machine reached just now.

    Attributes:
        threads: that computed.
        flops: operations a second of a product of two matrices, by type; a multiplication and an
            addition are two.
        bandwidth: bytes a second.
        bandwidth_bytes: size of the arrays that it was measured on, together.
    """

    threads: int
    flops: Mapping[str, float]
    bandwidth: float
    bandwidth_bytes: int


def measure_peaks(threads: int, working_set: float) -> Peaks:
    """Measure a matrix product of each type in ONNX Runtime, and a triad.

    The triad (J. D. McCalpin 1995, STREAM) adds a multiple of one array to another. Its arrays
    take as many bytes as the model moves: what fits into the caches comes from there.

    Args:
        threads: that compute.
        working_set: bytes that one run of the model moves.
    """
    flops = {
        dtype: max(_product(op, left, right, threads) for op, left, right in kinds)
        for dtype, kinds in _PRODUCTS.items()
    }
    size = int(min(max(working_set, _LEAST_BYTES), _MOST_BYTES))
    return Peaks(threads, flops, _triad(size, threads), size)


def _product(operator: str, left: Any, right: Any, threads: int) -> float:
    rng = np.random.default_rng(0)
    runner = OrtRunner(_model(operator, _values(rng, right), left), "a product", threads)
    batch = {"x": _values(rng, left)}
    seconds = _fastest(lambda: runner.run(batch))
    return 2.0 * _SIDE**3 / seconds


def _values(rng: np.random.Generator, dtype: Any) -> Array:
    shape = (_SIDE, _SIDE)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 127, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _model(operator: str, weight: Array, left: Any) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    given = helper.np_dtype_to_tensor_dtype(np.dtype(left))
    made = TensorProto.INT32 if operator == "MatMulInteger" else given
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"])],
        "product",
        [value("x", given, [_SIDE, _SIDE])],
        [value("y", made, [_SIDE, _SIDE])],
        [numpy_helper.from_array(weight, "w")],
    )
    opset = helper.make_opsetid("", 21)
    version = helper.find_min_ir_version_for([opset])
    proto = helper.make_model(graph, opset_imports=[opset], ir_version=version)
    return bytes(proto.SerializeToString())


def _triad(size: int, threads: int) -> float:
    elements = size // (_ARRAYS * 4)
    first, second, third = (torch.ones(elements) for _ in range(_ARRAYS))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = _fastest(lambda: torch.add(first, second, alpha=3.0, out=third))
    finally:
        torch.set_num_threads(before)
    return _ARRAYS * 4 * elements / seconds


def _fastest(run: Callable[[], object]) -> float:
    """Return the least time of many runs: others may have the machine in between."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _LEAST_RUNS or time.perf_counter() - start < _SECONDS:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
