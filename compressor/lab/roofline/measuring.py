"""Measure: each operator that ONNX Runtime executes, and what the machine can do at most."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from compressor.files import scratch
from compressor.graph.layers import layer_of
from compressor.graph.operators import names, operator_named
from compressor.graph.values import all_nodes
from compressor.models.onnx.ort_session import EXECUTED, OrtRunner, merges_halves
from compressor.types.tensors import Array, Batch

_WARM_UP = 5
_LEAST_RUNS, _MOST_RUNS = 15, 200
_SECONDS = 2.0
_END = "_kernel_time"
_ADDED = re.compile(r"(_nchwc)?(_token_\d+)*$")
_WITHOUT_ROW = ("Attention", "GRU", "LSTM", "RNN")


@dataclass(frozen=True)
class Kernel:
    """An operator as it is executed.

    Attributes:
        seconds: of one run.
    """

    name: str
    op: str
    seconds: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Timed:
    """Times of a model and of its operators, from runs that took turns.

    Attributes:
        seconds: of each run from end to end, without the profiler, ``[runs]``.
    """

    seconds: Array
    kernels: tuple[Kernel, ...]
    runtime: str


def time_kernels(model: Path, batch: Batch, threads: int, subject: str) -> Timed:
    """Run a model with the runtime's profiler on and off, in turn.

    Raises:
        ModelError: it does not load or run.
    """
    merge = not merges_halves(model)
    plain = OrtRunner(model, subject, threads, merge=merge)
    seconds: list[float] = []
    with scratch() as folder:
        profiled = OrtRunner(model, subject, threads, profile=folder, merge=merge)
        for _ in range(_WARM_UP):
            plain.run(batch)
            profiled.run(batch)
        start = time.perf_counter()
        while len(seconds) < _LEAST_RUNS or (
            len(seconds) < _MOST_RUNS and time.perf_counter() - start < _SECONDS
        ):
            begin = time.perf_counter()
            plain.run(batch)
            seconds.append(time.perf_counter() - begin)
            profiled.run(batch)
        events = json.loads(profiled.end_profile().read_text(encoding="utf-8"))
        executed = onnx.load(folder / EXECUTED, load_external_data=False)
    runs = len(seconds) + _WARM_UP
    return Timed(np.asarray(seconds), tuple(_kernels(events, executed, runs)), plain.runtime)


def _kernels(
    events: Sequence[Mapping[str, Any]], executed: onnx.ModelProto, runs: int
) -> Iterator[Kernel]:
    nodes = {node.name: node for node in executed.graph.node}
    times: dict[str, list[float]] = defaultdict(list)
    ops: dict[str, str] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith(_END):
            continue
        kernel = event["name"].removesuffix(_END)
        ops[kernel] = str(event["args"]["op_name"])
        times[kernel].append(float(event["dur"]) * 1e-6)
    for kernel, seconds in times.items():
        if operator_named(ops[kernel]).family == "control":
            continue  # its time holds those of the nodes inside
        node = nodes.get(kernel)
        yield Kernel(
            kernel,
            ops[kernel],
            undisturbed(seconds) * max(1, round(len(seconds) / runs)),  # a loop runs it again
            () if node is None else tuple(node.input),
            () if node is None else tuple(node.output),
        )


def undisturbed(seconds: Sequence[float] | Array) -> float:
    """Return the mean of the fastest quarter: the time on an otherwise idle machine.

    The profiler's clock ticks in microseconds, so that the least time says little of an operator
    that takes two.
    """
    ordered = np.sort(seconds)
    return float(ordered[: -(-len(ordered) // 4)].mean())


def nodes_of_kernels(model: ir.Model, kernels: Sequence[Kernel]) -> dict[str, list[ir.Node]]:
    """Find which nodes each kernel computes, by its name.

    A kernel is recognised by the weight that it reads, the value that it writes, or its name,
    which the runtime makes of either. What no kernel is recognised by has been fused into the one
    that reads its result.

    Args:
        model: the graph that was given to the runtime.
    """
    nodes = list(all_nodes(model.graph))
    owners: dict[ir.Node, str] = {}
    readers = {layer.weight: node for node in nodes if (layer := layer_of(node)) is not None}
    named = _named(nodes)
    for kernel in kernels:
        weights = kernel.inputs if _multiplies(kernel.op) else ()
        candidates = [readers[n] for n in weights if n in readers]
        names = [*kernel.outputs, kernel.name, _ADDED.sub("", kernel.name)]  # most telling first
        candidates += [named[n] for n in names if n in named]
        if candidates:
            owners.setdefault(candidates[0], kernel.name)
    ops = {kernel.name: kernel.op for kernel in kernels}
    for node in reversed(nodes):
        if node in owners:
            continue
        after = [u.node for v in node.outputs for u in v.uses() if u.node in owners]
        owner = owners[after[0]] if after else None
        if owner is not None and (_multiplies(ops[owner]) or layer_of(node) is None):
            owners[node] = owner
    members: dict[str, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        if node in owners:
            members[owners[node]].append(node)
    return dict(members)


def _multiplies(op: str) -> bool:
    products = (*names(lambda row: row.layer is not None), *_WITHOUT_ROW)
    return any(product in op for product in products)


def _named(nodes: Sequence[ir.Node]) -> dict[str, ir.Node]:
    by_name = {node.name: node for node in nodes if node.name}
    by_name.update({v.name: node for node in nodes for v in node.outputs if v.name})
    return by_name


_SIDE = 512
_PEAK_SECONDS = 0.25
_LEAST_MATRIX_PRODUCTS = 3
_ARRAYS = 3  # of a triad: two are read, one is written
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 192 << 20
_MATRIX_PRODUCTS: Mapping[str, Sequence[tuple[Any, Any]]] = {
    "float32": [(np.float32, np.float32)],
    "float16": [(np.float16, np.float16)],
    # Which of the two has a fast kernel depends on the processor.
    "int8": [(np.uint8, np.int8), (np.int8, np.int8)],
}


@dataclass(frozen=True)
class Peaks:
    """What this machine reached just now.

    Attributes:
        flops: operations a second of a product of two matrices, by type; a multiplication and an
            addition are two.
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
        working_set: bytes that one run of the model moves.
    """
    flops = {
        dtype: max(_product(left, right, threads) for left, right in kinds)
        for dtype, kinds in _MATRIX_PRODUCTS.items()
    }
    size = int(min(max(working_set, _LEAST_BYTES), _MOST_BYTES))
    return Peaks(threads, flops, _triad(size, threads), size)


def _product(left: Any, right: Any, threads: int) -> float:
    rng = np.random.default_rng(0)
    from onnx import TensorProto, helper, numpy_helper

    value = helper.make_tensor_value_info
    element = helper.np_dtype_to_tensor_dtype(np.dtype(left))
    integer = np.issubdtype(left, np.integer)
    (operator,) = names(lambda row: row.is_matmul and row.unscaled == row.integer == integer)
    made = TensorProto.INT32 if integer else element
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"])],
        "product",
        [value("x", element, [_SIDE, _SIDE])],
        [value("y", made, [_SIDE, _SIDE])],
        [numpy_helper.from_array(_values(rng, right), "w")],
    )
    opset = helper.make_opsetid("", 21)
    version = helper.find_min_ir_version_for([opset])
    proto = helper.make_model(graph, opset_imports=[opset], ir_version=version)
    runner = OrtRunner(bytes(proto.SerializeToString()), "a product", threads)
    batch = {"x": _values(rng, left)}
    seconds = _fastest(lambda: runner.run(batch))
    return 2.0 * _SIDE**3 / seconds


def _values(rng: np.random.Generator, dtype: Any) -> Array:
    shape = (_SIDE, _SIDE)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 127, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


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
    while len(times) < _LEAST_MATRIX_PRODUCTS or time.perf_counter() - start < _PEAK_SECONDS:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
