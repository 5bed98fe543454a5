"""The same weights on the three carriers give the same codes and scales, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.types.carrier import Carrier
from compressor.types.layers import QuantizedTensor
from compressor.types.passes import PassContext
from tests.two_linears import TwoLinears, drawn, on_onnx, on_safetensors, on_torch

COLUMNS, WIDE, ROWS = 128, 256, 48
PRESETS = ("int8", "int4-g128", "int4-g32", "int2-g32", "fp8", "nvfp4", "mxfp4")
METHODS = [(preset, "rtn") for preset in PRESETS]
METHODS += [(preset, "hqq") for preset in ("int8", "int4-g128", "int4-g32", "int2-g32")]


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
    weights = drawn(COLUMNS, WIDE, ROWS)
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
    weights = drawn(COLUMNS, WIDE, ROWS)
    declared = QuantizeWeights.model_validate({"preset": preset})
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(2))
    outputs = []
    for carrier in (on_torch(weights), on_onnx(weights, tmp_path)):
        after = declared.apply(carrier, PassContext(), {}).carrier
        outputs.append(next(iter(after.runner().run({"x": x.numpy()}).values())))
    codes = quantized(on_safetensors(weights, tmp_path), preset, "rtn")
    net = TwoLinears(COLUMNS, WIDE, ROWS)
    net.load_state_dict(weights | {f"{n}.weight": q.dequantize() for n, q in codes.items()})
    with torch.inference_mode():
        by_hand = net(x).numpy()
    for output in outputs:
        np.testing.assert_allclose(output, by_hand, rtol=1e-4, atol=1e-5)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
