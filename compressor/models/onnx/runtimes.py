"""Run ONNX files in the runtime that they were written for: ONNX Runtime or OpenVINO.

PyTorch is imported by the files that need it: a process that times how a file starts imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compressor.errors import ModelError, cut_line, last_line, message_lines, run_failure
from compressor.models.onnx.ort_session import PROVIDERS, OrtRunner, merges_halves, probe
from compressor.models.threads import usual_threads
from compressor.types.tensors import Batch, TensorSpec

if TYPE_CHECKING:
    import openvino

    from compressor.types.carrier import Runner


GPU = ("tensorrt", "ort-cuda")  # targets, on devices that add products in 32 bits


@cache
def usable_providers() -> tuple[str, ...]:
    """Return the names of the providers that start on this machine, found by starting them."""
    import onnxruntime as ort

    model = probe(17)
    built = ort.get_available_providers()
    usable = ["cpu"]
    ort.set_default_logger_severity(4)  # a provider that does not start logs at length
    try:
        for name in ("cuda", "tensorrt"):
            if PROVIDERS[name] in built:
                try:
                    OrtRunner(model, "probe", provider=name)
                except ModelError:  # its libraries or its device are missing
                    continue
                usable.append(name)
    finally:
        ort.set_default_logger_severity(2)
    return tuple(usable)


@dataclass(frozen=True)
class OnnxRuntime:
    """The runtime that executes an ONNX file.

    Attributes:
        library: the Python module of the runtime.
        provider: execution provider of ONNX Runtime; the other libraries compute on the CPU.
        exact: ONNX Runtime stands in for another device, whose sums do not saturate.
        merge: ONNX Runtime may merge transpositions with products.
    """

    library: Literal["onnxruntime", "openvino", "torch"] = "onnxruntime"
    provider: str = "cpu"
    exact: bool = False
    merge: bool = True

    def open(self, path: Path, subject: str) -> Runner:
        """Open a file.

        Raises:
            ModelError: the file does not load, or the provider does not start.
        """
        if self.library == "torch":
            return _in_torch(path)
        if self.library == "openvino":
            return OpenVinoRunner(path, subject)
        return OrtRunner(path, subject, provider=self.provider, exact=self.exact, merge=self.merge)


def _in_torch(path: Path) -> Runner:
    import onnx_ir as ir

    from compressor.models.executor import GraphModule
    from compressor.models.torch.matching import TorchRunner

    return TorchRunner(GraphModule(ir.load(path)).eval(), "the ONNX graph")


def _computes_in_bfloat16(path: Path) -> bool:
    import onnx_ir as ir

    from compressor.models.onnx.ort_runner import computes_in_bfloat16

    return computes_in_bfloat16(ir.load(path))


def why_elsewhere(target: str) -> str:
    """Return why a file for a target runs in another runtime here; empty if it does not."""
    if target == "tensorrt":
        return "meant for TensorRT"
    if target == "openvino" and find_spec("openvino") is None:
        return "meant for OpenVINO, which is not installed"
    if target == "ort-cuda" and "cuda" not in usable_providers():
        return "meant for ONNX Runtime's CUDA provider, which does not start here"
    return ""


def versions_of(target: str) -> dict[str, str]:
    """Return further libraries that run a file for a target, with their versions."""
    if why_elsewhere(target) or target == "ort-cpu":
        return {}
    return {target: version(target) if target == "openvino" else ""}


def runtime_for(target: str, path: Path) -> OnnxRuntime:
    """Return the runtime of a file's target if this machine has it, else ONNX Runtime on the CPU.

    PyTorch runs TensorRT's files that compute in bfloat16, for which ONNX Runtime has no kernels.
    """
    if target == "tensorrt" and _computes_in_bfloat16(path):
        return OnnxRuntime("torch")
    if target == "openvino" and not why_elsewhere(target):
        return OnnxRuntime("openvino")
    merge = not merges_halves(path)
    if why_elsewhere(target):
        return OnnxRuntime(exact=target in GPU, merge=merge)
    return OnnxRuntime(provider="cuda" if target == "ort-cuda" else "cpu", merge=merge)


# On CPUs with the instructions, OpenVINO would compute in bfloat16, and it would round activations
# to 8 bits before narrow weights. Every machine should measure the same file.
_EXACT: Mapping[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "PERFORMANCE_HINT": "LATENCY",
}


@cache
def _openvino_core() -> openvino.Core:
    """Return what loads OpenVINO's plugins, one for as long as the process lives.

    On some processors the plugin for CPUs gives the main thread another stack for signals. Where
    another thread unloads the plugin, as the garbage collector may, it frees that stack and leaves
    it in use: the next Ctrl-C would be a segmentation fault (2026.4).
    """
    import openvino

    return openvino.Core()


def openvino_reason(error: Exception) -> str:
    """Return in one line why OpenVINO does not take a model.

    Of operators that it cannot convert, its message says the reason first, and their names in a
    summary behind it.
    """
    reasons: list[str] = []
    summary: list[str] = []
    for line in message_lines(error):
        (summary if summary or line == "Summary:" else reasons).append(line)
    if not summary or not reasons:
        return last_line(error)
    names = summary[-1].removeprefix("-- ")
    failed = names.removeprefix("Conversion is failed for: ")
    return cut_line(names if failed == names else f"{failed}: {reasons[-1]}")


class OpenVinoRunner:
    """A model compiled for OpenVINO's CPU plugin.

    Raises:
        ModelError: OpenVINO does not read or compile it.
    """

    def __init__(self, path: Path, subject: str):
        import openvino

        release = openvino.__version__.partition("-")[0]
        core = _openvino_core()
        # 0 leaves the number to OpenVINO.
        settings = {**_EXACT, "INFERENCE_NUM_THREADS": usual_threads() or 0}
        try:
            self._model = core.compile_model(core.read_model(path), "CPU", settings)
        except RuntimeError as error:
            raise ModelError(
                subject,
                f"OpenVINO {release} does not load it ({openvino_reason(error)})",
                "export it with another opset, or for another target",
            ) from error
        self._subject = subject
        self._request = self._model.create_infer_request()
        self._inputs = {port.any_name for port in self._model.inputs}
        self._outputs = [port.any_name for port in self._model.outputs]
        self.runtime = f"openvino {release} (CPU)"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        try:
            results = self._request.infer(feed)
        except RuntimeError as error:
            raise run_failure(self._subject, last_line(error)) from error
        # The next run overwrites the request's buffers.
        return {name: np.array(results[name]) for name in self._outputs}

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        return tuple(
            TensorSpec(
                port.any_name,
                tuple(d.get_length() if d.is_static else None for d in port.partial_shape),
                port.element_type.to_dtype().name,
            )
            for port in self._model.inputs
        )

    @property
    def threads(self) -> int:
        """Number of threads that compute."""
        return int(self._model.get_property("INFERENCE_NUM_THREADS"))
