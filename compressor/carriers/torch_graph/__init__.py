"""Runs ONNX graphs as PyTorch modules."""

from compressor.carriers.torch_graph.convert import from_numpy
from compressor.carriers.torch_graph.deferred import DeferredGraphModule
from compressor.carriers.torch_graph.lazy import LazyTensor
from compressor.carriers.torch_graph.module import GraphModule

__all__ = ["DeferredGraphModule", "GraphModule", "LazyTensor", "from_numpy"]
