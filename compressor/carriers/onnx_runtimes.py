"""In which runtime an ONNX file is run on this machine: the one that it was written for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from compressor.carriers.ort_runner import OrtRunner, usable_providers

if TYPE_CHECKING:  # a cold start of an ONNX file is one without PyTorch
    from compressor.types.carrier import Runner


@dataclass(frozen=True)
class OnnxRuntime:
    """What runs an ONNX file.

    Attributes:
        library: the module that is imported for it.
        provider: of ONNX Runtime, by our name; the others compute on the CPU.
    """

    library: Literal["onnxruntime", "openvino", "torch"] = "onnxruntime"
    provider: str = "cpu"

    def open(self, path: Path, subject: str, threads: int | None = None) -> Runner:
        """Open a file.

        Args:
            path: the file.
            subject: what it is, for messages.
            threads: how many compute; ``None`` leaves it to the runtime. PyTorch takes as many
                as it is set to.

        Raises:
            ModelError: the file does not load, or the provider does not start.
        """
        if self.library == "torch":
            from compressor.carriers.torch_graph import GraphModule
            from compressor.carriers.torch_runner import TorchRunner

            return TorchRunner(GraphModule(ir.load(path)).eval(), "the ONNX graph")
        if self.library == "openvino":
            from compressor.carriers.openvino_runner import OpenVinoRunner

            return OpenVinoRunner(path, subject, threads)
        return OrtRunner(path, subject, threads, provider=self.provider)


def why_elsewhere(target: str) -> str:
    """Say why a file for a target is run in another runtime here; empty if it is not."""
    if target == "tensorrt":
        return "meant for TensorRT"
    if target == "openvino" and find_spec("openvino") is None:
        return "meant for OpenVINO, which is not installed"
    if target == "ort-cuda" and "cuda" not in usable_providers():
        return "meant for ONNX Runtime's CUDA provider, which does not start here"
    return ""


def versions_of(target: str) -> dict[str, str]:
    """Return what runs a file for a target besides ONNX Runtime and PyTorch, with its version."""
    if why_elsewhere(target) or target == "ort-cpu":
        return {}
    return {target: version(target) if target == "openvino" else ""}


def runtime_for(target: str, path: Path) -> OnnxRuntime:
    """Return a file's target where this machine has it, else ONNX Runtime on the CPU.

    That has no kernels for bfloat16, which only TensorRT's files may compute in: PyTorch runs
    those.
    """
    if target == "tensorrt":
        from compressor.carriers.graph_runners import computes_in_bfloat16

        if computes_in_bfloat16(ir.load(path)):
            return OnnxRuntime("torch")
    if why_elsewhere(target):
        return OnnxRuntime()
    if target == "openvino":
        return OnnxRuntime("openvino")
    return OnnxRuntime(provider="cuda" if target == "ort-cuda" else "cpu")
