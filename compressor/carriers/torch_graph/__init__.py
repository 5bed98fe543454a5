"""Runs ONNX graphs as PyTorch modules."""

from compressor.carriers.torch_graph.convert import from_numpy
from compressor.carriers.torch_graph.module import GraphModule

__all__ = ["GraphModule", "from_numpy"]
