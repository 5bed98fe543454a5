"""The same weights on the three carriers give the same codes and scales, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file

from compressor.carriers.checkpoint_carrier import open_checkpoint
from compressor.carriers.onnx_carrier import open_onnx
from compressor.carriers.torch_carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.quantized import QuantizedTensor
from compressor.types.tensors import TensorSpec
from passes.quantize.weight_only import QuantizeWeights

COLUMNS, WIDE, ROWS = 128, 256, 48
PRESETS = ("int8", "int4-g128", "int4-g32", "int2-g32", "fp8", "nvfp4", "mxfp4")
METHODS = [(preset, "rtn") for preset in PRESETS]
METHODS += [(preset, "hqq") for preset in ("int8", "int4-g128", "int4-g32", "int2-g32")]


class Net(torch.nn.Module):
    """Two linear layers, the first wide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = torch.nn.Linear(COLUMNS, WIDE)
        self.down = torch.nn.Linear(WIDE, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def on_torch(weights: Mapping[str, torch.Tensor]) -> Carrier:
    net = Net()
    net.load_state_dict(weights)
    return TorchCarrier(net, [TensorSpec("x", ("batch", COLUMNS), "float32")])


def on_safetensors(weights: Mapping[str, torch.Tensor], folder: Path) -> Carrier:
    save_file(dict(weights), folder / "model.safetensors")
    return open_checkpoint(folder / "model.safetensors")


def on_onnx(weights: Mapping[str, torch.Tensor], folder: Path) -> Carrier:
    """``Gemm`` with the weight as torch has it, and ``MatMul`` with the weight transposed."""
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
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


def quantized(carrier: Carrier, preset: str, method: str) -> dict[str, QuantizedTensor]:
    """Quantize a model and return what each layer's weight became.

    The carrier is asked to hold the codes; they are taken from what it was asked.
    """
    asked = {}
    declared = QuantizeWeights.model_validate({"preset": preset, "method": method})
    survey = declared.survey(carrier, PassContext())
    assert [row.touched for row in survey.layers] == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        original = type(carrier).with_codes

        def keep(self, changes):
            asked.update(changes)
            return original(self, changes)

        patch.setattr(type(carrier), "with_codes", keep)
        declared.apply(carrier, PassContext(), {})
    return {
        codes.layer.name: codes.compute(codes.layer.canonical(carrier.weight(codes.layer)))
        for codes in asked.values()
    }


@pytest.mark.parametrize(("preset", "method"), METHODS)
def test_codes_and_scales_are_bit_identical(tmp_path: Path, preset: str, method: str):
    weights = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    found = [
        quantized(carrier, preset, method)
        for carrier in (
            on_torch(weights),
            on_onnx(weights, tmp_path),
            on_safetensors(weights, tmp_path),
        )
    ]
    assert [sorted(own) for own in found] == [["down", "up"]] * 3
    for name, first in found[0].items():
        assert bool(first.dequantize().any())
        for other in (own[name] for own in found[1:]):
            assert other.scheme == first.scheme
            for part in ("codes", "scale", "zero_point"):
                ours, theirs = getattr(first, part), getattr(other, part)
                assert ours.dtype == theirs.dtype
                assert torch.equal(_bytes(ours), _bytes(theirs)), (name, part)
            assert (first.tensor_scale is None) == (other.tensor_scale is None)
            if first.tensor_scale is not None:
                assert torch.equal(first.tensor_scale, other.tensor_scale)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_models_that_hold_them_agree(tmp_path: Path, preset: str):
    """What torch's lowered graph and the ONNX file compute with the codes is the same."""
    weights = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    declared = QuantizeWeights.model_validate({"preset": preset})
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(2))
    outputs = []
    for carrier in (on_torch(weights), on_onnx(weights, tmp_path)):
        after = declared.apply(carrier, PassContext(), {}).carrier
        outputs.append(next(iter(after.runner().run({"x": x.numpy()}).values())))
    codes = quantized(on_safetensors(weights, tmp_path), preset, "rtn")
    net = Net()
    net.load_state_dict(weights | {f"{n}.weight": q.dequantize() for n, q in codes.items()})
    with torch.inference_mode():
        by_hand = net(x).numpy()
    for output in outputs:
        np.testing.assert_allclose(output, by_hand, rtol=1e-4, atol=1e-5)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
