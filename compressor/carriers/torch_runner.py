"""Run a graph in PyTorch, on numpy arrays."""

from __future__ import annotations

from typing import cast

import ml_dtypes
import onnx_ir as ir
import torch

from compressor.carriers.torch_graph import GraphModule, from_numpy
from compressor.types.tensors import Array, Batch


class TorchRunner:
    """A module that executes a graph, as a runner.

    Args:
        module: such as ``compressor.load`` returns.
        how: what made it, for reports.
    """

    def __init__(self, module: torch.nn.Module, how: str = "compressor.load"):
        self._module = cast("GraphModule", module)
        self.runtime = f"torch {torch.__version__} ({how})"

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: an input is missing or of another shape or dtype.
        """
        taken = {
            name: from_numpy(ir.tensor(array))
            for name, array in batch.items()
            if name in self._module.input_names
        }
        with torch.inference_mode():
            outputs = self._module(**taken)
        return {name: to_numpy(tensor) for name, tensor in outputs.items()}


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor's elements as an array; bfloat16 keeps its type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
