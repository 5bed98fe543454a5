"""A session of ONNX Runtime.

Nothing here imports PyTorch, which takes seconds: processes that time how an ONNX file starts would
wait for it in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, run_failure
from compressor.models.threads import usual_threads
from compressor.types.tensors import Array, Batch, TensorSpec

_PREFIX = r"^(\[ONNXRuntimeError\] : \d+ : \w+ : )?(Load model from .*? failed:)?"
PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
"""ONNX Runtime's execution providers by our names; the CPU runs operators that one lacks."""

NO_KERNEL = "Could not find an implementation"
"""How ONNX Runtime says that it has an operator for other types only."""

_REMEDIES = {
    NO_KERNEL: "export the model in float32: it has that operator for other types only",
    "two nodes with same node name": "clear the names of the nodes (node.name), which mean "
    "nothing, and save the file again",
}
_REMEDY = "check the file with the onnx checker, or export it with another opset"

_DTYPES = {
    f"tensor({name})": dtype
    for name, dtype in {
        "float": "float32",
        "double": "float64",
        **{n: n for n in ("float16", "bool", "int8", "uint8", "int16", "int32", "int64")},
    }.items()
}
_FEWEST_AXES = 3  # of two, a product reads them in either order
_TITLES = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "TensorRT"}
_EXACT: ContextVar[bool] = ContextVar("exact", default=False)
EXECUTED = "executed.onnx"


@contextmanager
def exact_products(wanted: bool) -> Iterator[None]:
    """Make graphs that are opened inside the block multiply dequantized values; see ``exact``.

    Files are not meant: each is opened as its own target computes.
    """
    token = _EXACT.set(wanted)
    try:
        yield
    finally:
        _EXACT.reset(token)


def products_are_exact() -> bool:
    """Whether a graph that is opened now multiplies dequantized values."""
    return _EXACT.get()


class OrtRunner:
    """One ONNX Runtime session.

    Args:
        model: a path, or a serialized model.
        threads: intra-operator threads; ``None`` for those of :func:`on_threads`.
        optimize: let the runtime optimize the graph, which checking that it loads does not need.
        provider: the execution provider, by our name.
        weights: values of the model's external initializers, which are shared, not copied.
        arena: keep the memory of a run for the next.
        merge: merge transpositions with products; see :func:`merges_halves`.
        exact: multiply what codes stand for, and not the codes: on x86 CPUs without VNNI,
            integer kernels saturate where those of the device that is meant do not.
        patterns: take the memory of a run at once, as one of the same shapes before it did.
        profile: an empty folder for the optimized graph, :data:`EXECUTED`, and the times of its
            operators, which :meth:`end_profile` writes.

    Raises:
        ModelError: the runtime does not load the model, or does not start the provider.
    """

    def __init__(
        self,
        model: Path | bytes,
        subject: str,
        threads: int | None = None,
        *,
        optimize: bool = True,
        provider: str = "cpu",
        profile: Path | None = None,
        weights: Mapping[str, Array] | None = None,
        arena: bool = True,
        patterns: bool = True,
        exact: bool = False,
        merge: bool = True,
    ):
        import onnxruntime as ort

        options = _options(optimize=optimize, arena=arena, patterns=patterns, exact=exact)
        options.intra_op_num_threads = threads or usual_threads() or 0
        self._weights = dict(weights or {})  # the session reads them as long as it lives
        if self._weights:
            values = map(ort.OrtValue.ortvalue_from_numpy, self._weights.values())
            options.add_external_initializers(list(self._weights), list(values))
        if profile is not None:
            _profiled(options, profile)
        try:
            self._session = _session(
                model if isinstance(model, bytes) else str(model),
                options,
                provider,
                () if merge else ("MatmulTransposeFusion",),
            )
        except failures() as error:
            raise ModelError(
                subject,
                f"ONNX Runtime {ort.__version__} does not load it ({_first_line(error)})",
                next((r for part, r in _REMEDIES.items() if part in str(error)), _REMEDY),
            ) from error
        if PROVIDERS[provider] not in self._session.get_providers():
            raise ModelError(
                subject,
                f"runs without {PROVIDERS[provider]}, which ONNX Runtime {ort.__version__} could "
                "not start",
                "install the libraries that it needs, or use the provider cpu",
            )
        self._subject = subject
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._inputs = {i.name for i in self._session.get_inputs()}
        ends = (*self._session.get_inputs(), *self._session.get_outputs())
        self._bfloat16 = any(end.type == "tensor(bfloat16)" for end in ends)
        self.runtime = f"onnxruntime {ort.__version__} ({_TITLES[provider]})"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        try:
            run = _run_without_numpy() if self._bfloat16 else type(self._session).run
            results = run(self._session, self._outputs, feed)
        except failures() as error:
            raise run_failure(self._subject, _first_line(error)) from error
        return dict(zip(self._outputs, results, strict=True))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        return tuple(
            TensorSpec(i.name, tuple(i.shape), _DTYPES.get(i.type, i.type))
            for i in self._session.get_inputs()
        )

    def end_profile(self) -> Path:
        """Return the file with the times of all operators so far, as JSON events."""
        return Path(self._session.end_profiling())


def _options(*, optimize: bool, arena: bool, patterns: bool, exact: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = patterns
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Threads that wait must not take processor time from those that compute: where other
    # processes want the same cores, spinning makes a run take many times as long.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Products with 4-bit weights would otherwise round activations to 8 bits (level 4).
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if exact:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def _profiled(options: Any, folder: Path) -> None:
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / EXECUTED)
    # A protobuf file holds at most 2 GB, and nobody reads the weights there.
    prefix = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{prefix}_file_name", "weights.bin")
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")


def probe(opset: int) -> bytes:
    """Return the smallest model in an opset, with which a runtime shows whether it starts."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", [x], [y])
    opsets = [helper.make_opsetid("", opset)]
    ir_version = helper.find_min_ir_version_for(opsets)
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version).SerializeToString()


def merges_halves(path: Path) -> bool:
    """Whether ONNX Runtime (1.31) ends the process when it opens a file of float16.

    That happens where it merges a transposition that moves the first axis behind with a product;
    :mod:`compressor.graph.half_transposes` keeps graphs from it. A file is opened as it is, without
    that optimizer.
    """
    state = path.stat() if path.is_file() else None
    return state is not None and _merges_halves(path, state.st_mtime_ns, state.st_size)


@lru_cache
def _merges_halves(path: Path, _changed: int, _size: int) -> bool:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:  # which the runtime says better
        return False
    graphs = [model.graph]
    kinds, turns = set[int](), False
    for graph in graphs:  # grows by those of branches
        kinds.update(tensor.data_type for tensor in graph.initializer)
        kinds.update(value.type.tensor_type.elem_type for value in graph.input)
        for node in graph.node:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            graphs += [a.g for a in attributes.values() if a.HasField("g")]
            kinds.update(a.i for name, a in attributes.items() if name == "to")
            order = list(attributes["perm"].ints) if "perm" in attributes else []
            turns = turns or (len(order) >= _FEWEST_AXES and 0 in order[-2:])
    return turns and onnx.TensorProto.FLOAT16 in kinds


def _session(
    model: bytes | str, options: Any, provider: str, disabled: tuple[str, ...] = ()
) -> Any:
    """Start a session; where one of the runtime's optimizers breaks the graph, without it."""
    import onnxruntime as ort

    providers = list(dict.fromkeys((PROVIDERS[provider], PROVIDERS["cpu"])))
    # A silent fallback to the CPU would be measured as if it were the provider.
    start = partial(ort.InferenceSession, model, options, providers, enable_fallback=False)
    try:
        return start(disabled_optimizers=list(disabled))
    except failures() as error:
        # ONNX Runtime 1.31 moves int8 QuantizeLinear across Slice, and on some processors another
        # optimizer has changed the zero point to uint8 by then.
        if "QuantizeLinear" not in str(error) or "zero_point" not in str(error):
            raise
        return start(disabled_optimizers=[*disabled, "QDQPropagationTransformer"])


def _run_without_numpy() -> Callable[..., Any]:
    from compressor.models.element_types import run_without_numpy

    return run_without_numpy


def failures() -> tuple[type[Exception], ...]:
    """Exception types that ONNX Runtime's bindings raise."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
        state.EPFail,
        RuntimeError,
        ValueError,
    )


def _first_line(error: Exception) -> str:
    """Return the runtime's message without its own name, error code and file path."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(_PREFIX, "", line)[:300]
