"""Inputs of layers are rounded as the package compressed-tensors does it, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compressor.models.rounded_inputs import (
    input_tensor_scale,
    round_inputs_of,
    rounded_inputs,
)
from compressor.types.e2m1 import nearest_e2m1
from compressor.types.rounded_inputs import InputScheme

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize

LARGEST = 2.5  # below the greatest magnitude of the values: what is larger saturates
ARGUMENTS: dict[InputScheme, dict[str, Any]] = {
    InputScheme("int8"): {"num_bits": 8, "strategy": "token", "dynamic": True},
    InputScheme("int8", True, LARGEST): {"num_bits": 8, "strategy": "tensor"},
    InputScheme("fp8-e4m3"): {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    InputScheme("fp8-e4m3", True, LARGEST): {"num_bits": 8, "type": "float", "strategy": "tensor"},
    InputScheme("nvfp4", largest=LARGEST): {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "dynamic": "local", "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn,
    },
    InputScheme("mxfp4"): {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True,
        "scale_dtype": torch.uint8, "zp_dtype": torch.uint8,
    },
}  # fmt: skip


def values() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    made = torch.randn(2, 9, 64, generator=draw) * torch.logspace(-3, 1, 9)[:, None]
    made[0, 3] = 0.0  # a token without any signal
    made[1, 4, :32] = 0.0
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ARGUMENTS, ids=str)
def test_it_is_what_a_reader_of_the_layout_computes(scheme: InputScheme, dtype: torch.dtype):
    layer = torch.nn.Linear(64, 8, dtype=dtype)
    layer.quantization_status = QuantizationStatus.FROZEN
    if scheme.static:
        layer.input_scale = torch.tensor([scheme.scale], dtype=dtype)
    if scheme.format == "nvfp4":
        layer.input_global_scale = 1 / input_tensor_scale(scheme)
    given = values().to(dtype)
    wanted = forward_quantize(layer, given, "input", QuantizationArgs(**ARGUMENTS[scheme]))
    found = rounded_inputs(given, scheme)
    assert found.dtype == dtype
    assert torch.equal(found, wanted.to(dtype))
    assert not torch.equal(found, given)


def test_e2m1_rounds_halves_to_the_even_code():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -2.5])
    assert nearest_e2m1(halves).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -2.0]


def test_a_static_scale_is_that_of_what_calibration_saw():
    scheme = InputScheme("int8", True, LARGEST)
    found = rounded_inputs(torch.tensor([[LARGEST, -LARGEST, 9.0, 0.0]]), scheme)
    assert found[0].tolist() == pytest.approx([LARGEST, -LARGEST, LARGEST, 0.0])
    assert InputScheme("int8", True, 0.0).scale == 1.0
    assert input_tensor_scale(InputScheme("nvfp4", largest=0.0)).item() == 1.0
    with pytest.raises(ValueError, match="has no scale"):
        rounded_inputs(values(), InputScheme("int8", True))
    with pytest.raises(ValueError, match="has not been calibrated"):
        rounded_inputs(values(), InputScheme("nvfp4"))


def test_scales_of_nvfp4_leave_room_for_inputs_that_calibration_did_not_see():
    for largest in (0.3, 1.0, 2688.0, 5000.0):
        scale = input_tensor_scale(InputScheme("nvfp4", largest=largest)).item()
        assert largest <= scale * 448 * 6 < 2 * largest or scale * 448 * 6 == largest
        assert torch.frexp(torch.tensor(scale)).mantissa == 0.5


def test_a_layer_rounds_what_it_reads():
    layer = torch.nn.Linear(64, 8)
    given = values()
    wanted = torch.nn.functional.linear(
        rounded_inputs(given, InputScheme("int8")), layer.weight, layer.bias
    )
    round_inputs_of(layer, InputScheme("int8"))
    assert torch.equal(layer(given), wanted)
