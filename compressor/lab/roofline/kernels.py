"""Time each operator that ONNX Runtime executes, and find the nodes of the graph it stands for."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from compressor.graph.layers import layer_of
from compressor.graph.operators import names, operator_named
from compressor.graph.values import all_nodes
from compressor.models.onnx.ort_runner import EXECUTED, OrtRunner
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
        name: its name in the executed graph.
        op: the operator.
        seconds: of one run.
        inputs: names of what it reads.
        outputs: names of what it writes.
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
        kernels: what is executed.
        runtime: what executed it.
    """

    seconds: Array
    kernels: tuple[Kernel, ...]
    runtime: str


def time_kernels(model: Path, batch: Batch, threads: int, subject: str) -> Timed:
    """Run a model with the runtime's profiler on and off, in turn.

    Args:
        model: an ONNX file.
        batch: what it is run on.
        threads: that compute.
        subject: what the model is, for messages.

    Raises:
        ModelError: it does not load or run.
    """
    plain = OrtRunner(model, subject, threads)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiled = OrtRunner(model, subject, threads, profile=folder)
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
    """Yield the operators of a profile, as they lie in the executed graph."""
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
    """Return the mean of the fastest quarter: what there is if nobody else has the machine.

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
        kernels: what it executes.
    """
    nodes = list(all_nodes(model.graph))
    owners: dict[ir.Node, str] = {}
    readers = {layer.weight: node for node in nodes if (layer := layer_of(node)) is not None}
    named = _named(nodes)
    for kernel in kernels:
        weights = kernel.inputs if _multiplies(kernel.op) else ()
        found = [readers[n] for n in weights if n in readers]
        found += [named[n] for n in _names(kernel) if n in named]
        if found:
            owners.setdefault(found[0], kernel.name)
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
    """Return the node that is meant by a name: that of a value, or its own."""
    found = {node.name: node for node in nodes if node.name}
    found.update({v.name: node for node in nodes for v in node.outputs if v.name})
    return found


def _names(kernel: Kernel) -> list[str]:
    """Return the names to recognise a kernel by, the most telling first."""
    return [*kernel.outputs, kernel.name, _ADDED.sub("", kernel.name)]
