"""The same weights on the three carriers, for tests of prune-magnitude."""

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

from compressor.carriers.checkpoint_carrier import CheckpointCarrier, open_checkpoint
from compressor.carriers.onnx_carrier import OnnxCarrier, open_onnx
from compressor.carriers.torch_carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from passes.prune.magnitude import PruneMagnitude

COLUMNS, WIDE, ROWS = 64, 96, 48
ANY = PassContext()


class Net(nn.Module):
    """Two linear layers, the first wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(COLUMNS, WIDE)
        self.down = nn.Linear(WIDE, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of unlike sizes, on a coarse grid, so that many magnitudes are shared."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (WIDE, COLUMNS), "down.weight": (ROWS, WIDE)}
    found = {n: torch.randn(s, generator=generator).mul(16).round() / 16 for n, s in shapes.items()}
    found["up.weight"] = found["up.weight"] / 2
    found["up.bias"] = torch.randn(WIDE, generator=generator)
    return found


@cache
def _lowered() -> TorchCarrier:
    """Return a carrier with any weights: to lower the module takes longer than to prune it."""
    return TorchCarrier(Net(), [TensorSpec("x", ("batch", COLUMNS), "float32")])


def on_torch(tensors: Mapping[str, torch.Tensor]) -> TorchCarrier:
    return _lowered().with_weights(tensors)


def on_safetensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> CheckpointCarrier:
    save_file(dict(tensors), folder / "model.safetensors")
    return open_checkpoint(folder / "model.safetensors")


def on_onnx(tensors: Mapping[str, torch.Tensor], folder: Path) -> OnnxCarrier:
    """``Gemm`` with the weight as torch has it, and ``MatMul`` with the weight transposed."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    arrays["down.weight"] = np.ascontiguousarray(arrays["down.weight"].T)
    nodes = [
        helper.make_node("Gemm", ["x", "up.weight", "up.bias"], ["a"], transB=1),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "down.weight"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kind, ["batch", COLUMNS])],
        [helper.make_tensor_value_info("y", kind, ["batch", ROWS])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "net.onnx")
    return open_onnx(folder / "net.onnx", 21)


def pruned(carrier: Carrier, declared: PruneMagnitude) -> dict[str, torch.Tensor]:
    """Prune a model, and return its layers' weights in canonical form, by layer name."""
    return matrices(declared.apply(carrier, ANY, {}).carrier)


def matrices(carrier: Carrier) -> dict[str, torch.Tensor]:
    """Return the layers' weights in canonical form, by layer name."""
    return {x.name: x.canonical(carrier.weight(x)) for x in carrier.layers()}
