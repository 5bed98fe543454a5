"""Run ONNX models in ONNX Runtime, or in PyTorch where that does not take them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.files import scratch
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, is_op, value_by_name
from compressor.models.executor import GraphModule
from compressor.models.torch.matching import TorchRunner
from compressor.types.carrier import Runner
from compressor.types.tensors import Batch

_PREFIX = r"^(\[ONNXRuntimeError\] : \d+ : \w+ : )?(Load model from .*? failed:)?"
PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
"""ONNX Runtime's names of what computes, by ours; the CPU steps in for what one does not have."""

_TITLES = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "TensorRT"}
EXECUTED = "executed.onnx"
_INLINE_LIMIT = 1_500_000_000  # protobuf refuses messages of 2 GB


class OrtRunner:
    """One ONNX Runtime session.

    Args:
        model: a path, or a serialized model.
        subject: what the model is, for messages.
        threads: intra-operator threads; ``None`` leaves the choice to the runtime.
        optimize: let the runtime optimize the graph; what is only loaded need not be.
        provider: what computes; see :func:`usable_providers`.
        profile: an empty folder for the graph as it is executed, :data:`EXECUTED`, and the times
            of its operators, which :meth:`end_profile` writes.

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
    ):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Idle sessions must not take processor time from the one that is being measured.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # Products with 4-bit weights would otherwise round activations to 8 bits (level 4).
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if threads is not None:
            options.intra_op_num_threads = threads
        if profile is not None:
            _profiled(options, profile)
        try:
            self._session = _session(
                model if isinstance(model, bytes) else str(model), options, provider
            )
        except _failures() as error:
            raise ModelError(
                subject,
                f"ONNX Runtime {ort.__version__} does not load it ({_first_line(error)})",
                "check the file with the onnx checker, or export it with another opset",
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
        self.runtime = f"onnxruntime {ort.__version__} ({_TITLES[provider]})"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        try:
            results = self._session.run(self._outputs, feed)
        except _failures() as error:
            raise ModelError(
                self._subject,
                f"does not run ({_first_line(error)})",
                "check the inputs' shapes and dtypes in the spec",
            ) from error
        return dict(zip(self._outputs, results, strict=True))

    def end_profile(self) -> Path:
        """Return the file with the times of all operators since the start, as JSON events."""
        return Path(self._session.end_profiling())


def _profiled(options: Any, folder: Path) -> None:
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / EXECUTED)
    # A protobuf file holds 2 GB at most; and nobody reads the weights there.
    prefix = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{prefix}_file_name", "weights.bin")
    options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")


@cache
def usable_providers() -> tuple[str, ...]:
    """Return the names of the providers that start on this machine, found by starting them."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "probe",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(
        graph, opset_imports=[opset], ir_version=helper.find_min_ir_version_for([opset])
    ).SerializeToString()
    built = ort.get_available_providers()
    found = ["cpu"]
    ort.set_default_logger_severity(4)  # what does not start says so at length
    try:
        for name in ("cuda", "tensorrt"):
            if PROVIDERS[name] in built:
                try:
                    OrtRunner(model, "probe", provider=name)
                except ModelError:  # its libraries or its device are missing
                    continue
                found.append(name)
    finally:
        ort.set_default_logger_severity(2)
    return tuple(found)


def _session(model: bytes | str, options: Any, provider: str) -> Any:
    """Start a session; where an optimizer of the runtime breaks the graph, without that one."""
    import onnxruntime as ort

    providers = list(dict.fromkeys((PROVIDERS[provider], PROVIDERS["cpu"])))
    try:
        # What falls back to the CPU in silence would be measured for something else.
        return ort.InferenceSession(model, options, providers=providers, enable_fallback=False)
    except _failures() as error:
        # ONNX Runtime 1.31 moves int8 QuantizeLinear over Slice, and on some processors another
        # of its steps has by then changed the zero point to uint8.
        if "QuantizeLinear" not in str(error) or "zero_point" not in str(error):
            raise
        return ort.InferenceSession(
            model,
            options,
            providers=providers,
            enable_fallback=False,
            disabled_optimizers=["QDQPropagationTransformer"],
        )


def graph_runner(model: ir.Model, taps: Sequence[str] = (), subject: str = "model") -> OrtRunner:
    """Start a session for an ONNX IR model that also yields the values ``taps``."""
    from compressor.graph.blocks import sink_initializers
    from compressor.graph.values import value_by_name

    missing = [t for t in taps if t not in {o.name for o in model.graph.outputs}]
    model = model.clone()
    if missing:
        values = value_by_name(model)
        model.graph.outputs.extend(values[t] for t in missing)
    size = sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )
    if size < _INLINE_LIMIT:
        _read_external(model)
        proto = ir.to_proto(model)
        sink_initializers(proto.graph)
        return OrtRunner(proto.SerializeToString(), subject)
    with scratch() as folder:
        path = folder / "model.onnx"
        ir.save(model, path, external_data="model.onnx.data")
        return OrtRunner(path, subject)


def _read_external(model: ir.Model) -> None:
    """Bring external tensors into memory: a session from bytes cannot reach files."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(
                tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=name
            )


def _failures() -> tuple[type[Exception], ...]:
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
    """Return what the runtime says, without its own name, its code and the file's path."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(_PREFIX, "", line)[:300]


def runner_of(model: ir.Model, taps: Sequence[str]) -> Runner:
    """Start what runs a graph: ONNX Runtime, or PyTorch for what that has no kernels for.

    Args:
        model: the graph.
        taps: names of values that are returned beside the outputs.

    Raises:
        ModelError: it does not load.
    """
    if not computes_in_bfloat16(model):
        return graph_runner(model, taps)
    model = model.clone()
    values, outputs = value_by_name(model), model.graph.outputs
    known = {output.name for output in outputs}
    outputs.extend(values[name] for name in taps if name not in known)
    return TorchRunner(GraphModule(model).eval(), "the graph")


def _reads_codes(node: ir.Node) -> bool:
    row = operator(node)
    same = row.moves in ("same", "type") or row.family == "cast-like"
    return same or is_op(node, "DequantizeLinear")


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Tell whether an operator works on bfloat16, beside those that only read a stored weight."""
    return any(
        value is not None and value.dtype == ir.DataType.BFLOAT16
        for node in all_nodes(model.graph)
        if not _reads_codes(node)
        for value in (*node.inputs, *node.outputs)  # a file may say types of its weights alone
    )
