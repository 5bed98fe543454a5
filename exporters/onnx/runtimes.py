"""In which runtime a written model is opened on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import onnx_ir as ir

from compressor.carriers.graph_runners import computes_in_bfloat16
from compressor.carriers.ort_runner import OrtRunner, usable_providers
from compressor.carriers.torch_graph import GraphModule
from compressor.carriers.torch_runner import TorchRunner
from compressor.types.carrier import Runner

_HERE = "timed in ONNX Runtime on the CPU"


def not_judged(target: str) -> str:
    """Say why times on this machine tell nothing about a target; empty if they do."""
    if target == "tensorrt":
        return f"meant for TensorRT, {_HERE}"
    if target == "openvino" and find_spec("openvino") is None:
        return f"meant for OpenVINO, which is not installed, {_HERE}"
    if target == "ort-cuda" and "cuda" not in usable_providers():
        return f"meant for ONNX Runtime's CUDA provider, which does not start here, {_HERE}"
    return ""


def runner_for(target: str, path: Path, subject: str) -> Runner:
    """Open a model in its target where this machine has it, else in ONNX Runtime on the CPU.

    That has no kernels for bfloat16, which only TensorRT's files may compute in: PyTorch runs
    those.

    Raises:
        ModelError: it does not load.
    """
    if target == "tensorrt":
        model = ir.load(path)
        if computes_in_bfloat16(model):
            return TorchRunner(GraphModule(model).eval(), "the ONNX graph")
    if not_judged(target):
        return OrtRunner(path, subject)
    if target == "openvino":
        from exporters.onnx.openvino_runner import OpenVinoRunner

        return OpenVinoRunner(path, subject)
    return OrtRunner(path, subject, provider="cuda" if target == "ort-cuda" else "cpu")
