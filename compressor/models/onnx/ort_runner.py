"""Run ONNX models in ONNX Runtime, or in PyTorch where that does not take them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import ModelError, first_line
from compressor.files import scratch
from compressor.graph.blocks import sink_constants
from compressor.graph.group_norms import as_instance_norms
from compressor.graph.half_transposes import transpose_as_floats
from compressor.graph.operators import operator
from compressor.graph.skeleton import detached_weights
from compressor.graph.values import all_nodes, value_by_name
from compressor.models.executor import GraphModule
from compressor.models.onnx.ort_session import NO_KERNEL, OrtRunner, products_are_exact
from compressor.models.onnx.saving import save_graph
from compressor.models.onnx.stored_weights import read_as_floats
from compressor.models.onnx.transposed_weights import transpose_weights
from compressor.models.resident_memory import forget_pages, return_freed_memory
from compressor.models.torch.matching import TorchRunner
from compressor.types.carrier import Runner
from compressor.types.tensors import Array

KEPT = 1 << 14  # bytes: shapes, axes, zero points: constants that a runtime reads as it starts
OLDEST_RUN = 7  # opset from which on ONNX Runtime has kernels
_INLINE_LIMIT = 1_500_000_000  # protobuf refuses messages of 2 GB


def graph_runner(
    model: ir.Model,
    taps: Sequence[str] = (),
    subject: str = "model",
    *,
    optimize: bool = True,
) -> OrtRunner:
    """Start a session for an ONNX IR model that also yields the values ``taps``.

    Large weights are not copied: the session reads them where they are.

    Args:
        optimize: let the runtime optimize the graph.
    """
    return _graph_opener(model, taps, subject, optimize=optimize)()


def _graph_opener(
    model: ir.Model, taps: Sequence[str], subject: str, *, arena: bool = True, optimize: bool = True
) -> Callable[[], OrtRunner]:
    """Return a function that starts sessions as :func:`graph_runner` does."""
    model = _tapped(model, taps)
    read_as_floats(model)
    transpose_as_floats(model)
    if not taps:
        as_instance_norms(model)
    shared = detached_weights(model, KEPT)
    transpose_weights(model, shared)
    size = sum(
        v.const_value.nbytes
        for v in model.graph.initializers.values()
        if v.const_value is not None and v.name not in shared
    )
    started = partial(
        OrtRunner,
        subject=subject,
        weights=shared,
        arena=arena,
        patterns=not taps,
        optimize=optimize,
        exact=products_are_exact(),
    )
    if size >= _INLINE_LIMIT:
        return partial(_opened_as_file, model, started, shared)
    _read_external(model, shared)
    try:
        proto = ir.to_proto(model)
    except ir.serde.SerdeError as error:
        problem = f"is not a graph ({first_line(error.__cause__ or error)})"
        raise ModelError(subject, problem, "export it again") from error
    sink_constants(proto.graph)
    return _opener(proto.SerializeToString(), started, shared)


def _opener(
    content: bytes, started: Callable[[bytes], OrtRunner], weights: Mapping[str, Array]
) -> Callable[[], OrtRunner]:
    """Return what starts sessions of a serialized graph.

    The first start gives back to the system what was freed. Later ones take what those before them
    have freed: to take it from the system again would double their time.
    """
    again = False

    def opened() -> OrtRunner:
        nonlocal again
        if not again:
            return_freed_memory()  # of the session before
        runner = started(content)
        if not again:
            return_freed_memory()  # a session holds half of what it takes to start it
        again = True
        forget_pages(weights.values())  # it has its own form of those that it multiplies with
        return runner

    return opened


def _opened_as_file(
    model: ir.Model, started: Callable[[Path], OrtRunner], weights: Mapping[str, Array]
) -> OrtRunner:
    with scratch() as folder:
        path = folder / "model.onnx"
        save_graph(model, path)
        runner = started(path)
    forget_pages(weights.values())
    return runner


def _tapped(model: ir.Model, taps: Sequence[str]) -> ir.Model:
    """Return a copy of a model that also gives the values ``taps``."""
    model = model.clone()
    outputs = model.graph.outputs
    missing = set(taps) - {output.name for output in outputs}
    if missing:
        values = value_by_name(model)
        outputs.extend(values[name] for name in taps if name in missing)
    return model


def _read_external(model: ir.Model, but: Collection[str]) -> None:
    """Bring external tensors into memory: a session from bytes cannot reach files."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and name not in but:
            value.const_value = ir.Tensor(
                tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=name
            )


def runner_of(
    model: ir.Model, taps: Sequence[str] = (), subject: str = "model", *, arena: bool = True
) -> Runner:
    """Start a runtime for a graph: ONNX Runtime, or PyTorch where that lacks the kernels.

    Args:
        taps: names of values that are returned along with the outputs.
        arena: keep the memory of a run for the next. The inner values ``taps`` outlive their run,
            so that the next one finds no block for all of its memory, and takes it piece by piece.

    Raises:
        ModelError: it does not load.
    """
    return opener_of(model, taps, subject, arena=arena)()


def opener_of(
    model: ir.Model, taps: Sequence[str] = (), subject: str = "model", *, arena: bool = True
) -> Callable[[], Runner]:
    """Return a function that starts runtimes as :func:`runner_of`; the graph is serialized once."""
    if not lacks_kernels(model):
        return _graph_opener(model, taps, subject, arena=arena)
    return lambda: TorchRunner(GraphModule(_tapped(model, taps)).eval(), "the graph")


def lacks_kernels(model: ir.Model) -> bool:
    """Whether ONNX Runtime's CPU provider has no kernels for a type that a graph computes in.

    It has none for bfloat16, and for float64 those of some operators, of which it is asked.
    """
    if computes_in_bfloat16(model) or not _computes_in(model, ir.DataType.DOUBLE):
        return computes_in_bfloat16(model)
    try:
        OrtRunner(without_weights(model), "model", optimize=False)
    except ModelError as error:
        return NO_KERNEL in error.problem
    return False


def without_weights(model: ir.Model) -> bytes:
    """Return a graph, serialized, whose large weights are inputs without a value."""
    plain = model.clone()
    common.RemoveInitializersFromInputsPass()(plain)
    common.LiftSubgraphInitializersToMainGraphPass()(plain)
    graph = plain.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= KEPT:
            continue
        del graph.initializers[name]
        value.const_value = None
        value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        if not value.is_graph_input():
            graph.inputs.append(value)
    return ir.to_proto(plain).SerializeToString()


def _reads_codes(node: ir.Node) -> bool:
    row = operator(node)
    return row.moves in ("same", "type") or row.family == "cast-like" or row.dequantizes


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether an operator computes in bfloat16, other than those that only read a weight."""
    return _computes_in(model, ir.DataType.BFLOAT16)


def _computes_in(model: ir.Model, dtype: ir.DataType) -> bool:
    return any(
        value is not None and value.dtype == dtype
        for node in all_nodes(model.graph)
        if not _reads_codes(node)
        for value in (*node.inputs, *node.outputs)  # a file may say types of its weights alone
    )
