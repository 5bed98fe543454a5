"""Runs ONNX graphs as PyTorch modules."""

from compressor.models.executor.compiler import unknown_operators
from compressor.models.executor.module import DeferredGraphModule, GraphModule, bound_inputs

__all__ = ["DeferredGraphModule", "GraphModule", "bound_inputs", "unknown_operators"]
