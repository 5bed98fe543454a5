"""Runs ONNX graphs as PyTorch modules."""

from compressor.models.executor.convert import from_numpy
from compressor.models.executor.deferred import DeferredGraphModule
from compressor.models.executor.lazy import LazyTensor
from compressor.models.executor.module import GraphModule

__all__ = ["DeferredGraphModule", "GraphModule", "LazyTensor", "from_numpy"]
