"""The same weights of two linear layers on the three carriers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.tensors import TensorSpec


class TwoLinears(nn.Module):
    """Two linear layers, of which only the first has a bias."""

    def __init__(self, columns: int, wide: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(columns, wide)
        self.down = nn.Linear(wide, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def drawn(columns: int, wide: int, rows: int) -> dict[str, torch.Tensor]:
    """Weights as the module has them at first, always the same."""
    state = TwoLinears(columns, wide, rows).state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


@cache
def _lowered(columns: int, wide: int, rows: int) -> TorchCarrier:
    """Return a carrier with any weights: to lower the module takes longer than what is tested."""
    return TorchCarrier(
        TwoLinears(columns, wide, rows), [TensorSpec("x", ("batch", columns), "float32")]
    )


def on_torch(tensors: Mapping[str, torch.Tensor]) -> TorchCarrier:
    (wide, columns), rows = tensors["up.weight"].shape, len(tensors["down.weight"])
    return _lowered(columns, wide, rows).with_weights(tensors)


def on_safetensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> CheckpointCarrier:
    save_file(dict(tensors), folder / "model.safetensors")
    return open_checkpoint(folder / "model.safetensors")


def on_onnx(tensors: Mapping[str, torch.Tensor], folder: Path) -> OnnxCarrier:
    """``Gemm`` with the weight as torch has it, and ``MatMul`` with the weight transposed."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    arrays["down.weight"] = np.ascontiguousarray(arrays["down.weight"].T)
    columns, rows = tensors["up.weight"].shape[1], len(tensors["down.weight"])
    nodes = [
        helper.make_node("Gemm", ["x", "up.weight", "up.bias"], ["a"], transB=1),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "down.weight"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, ["batch", columns])],
        [helper.make_tensor_value_info("y", kind, ["batch", rows])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "net.onnx")
    return open_onnx(folder / "net.onnx", 21)
