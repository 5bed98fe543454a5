"""Runs ONNX graphs as PyTorch modules."""

from compressor.models.executor.compiler import unknown_operators
from compressor.models.executor.dtypes import from_numpy
from compressor.models.executor.lazy import LazyTensor
from compressor.models.executor.module import DeferredGraphModule, GraphModule, bound_inputs

__all__ = [
    "DeferredGraphModule",
    "GraphModule",
    "LazyTensor",
    "bound_inputs",
    "from_numpy",
    "unknown_operators",
]
