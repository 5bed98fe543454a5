"""Runs ONNX graphs as PyTorch modules."""

from compressor.models.executor.compiler import OLDEST_OPSET, unknown_operators
from compressor.models.executor.module import GraphModule
from compressor.models.executor.program import bound_inputs

__all__ = ["OLDEST_OPSET", "GraphModule", "bound_inputs", "unknown_operators"]
