"""Round the inputs of layers, and cached keys and values, as the readers of an export do.

Scales that are found as a model runs have to be found as its readers do it, or a reference would
differ from what is served. The rules are those of the package compressed-tensors 0.20, and for
keys and values of int8 and int4 those of ``GroupQueryAttention`` in ONNX Runtime 1.31.

- int8 and fp8-e4m3 (arXiv:2209.05433): a token's scale is its greatest magnitude over half the
  range, 127.5 or 448.
- mxfp4: OCP Microscaling Formats 1.0, ``e2m1`` in groups of 32 whose scales are powers of two. An
  exponent is raised where the greatest magnitude would round to the next power of two.
- nvfp4: NVIDIA 2025, ``e2m1`` in groups of 16 whose scales are ``e4m3`` times one stored float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.types.e2m1 import E2M1_LARGEST, nearest_e2m1
from compressor.types.rounded_inputs import CacheScheme, InputScheme, Part

_HALF_RANGE = {"int8": 127.5, "fp8-e4m3": 448.0}
_ENDS = {"int4": (-8, 7), "int8": (-128, 127)}
_E4M3_LARGEST = 448.0
_E4M3_LEAST = 0.125  # what the package takes in place of a scale of 0
_E2M1_EXPONENT = 2  # of the largest power of two among the values of e2m1
_RAISED = 1.75  # a mantissa from which on the exponent is the next one's


def rounded_inputs(values: Tensor, scheme: InputScheme) -> Tensor:
    """Return inputs as a scheme rounds them, in their own dtype and shape ``[..., channels]``.

    Raises:
        ValueError: calibration has not found what the scheme stores, or the channels do not divide
            into groups.
    """
    if scheme.group is not None:
        grouped = values.reshape(*values.shape[:-1], -1, scheme.group)
        return (_nvfp4 if scheme.format == "nvfp4" else _mxfp4)(grouped, scheme).flatten(-2)
    if scheme.static:
        scale = torch.tensor(scheme.scale, dtype=values.dtype)
    else:
        largest = values.abs().amax(-1, keepdim=True)
        scale = largest / _HALF_RANGE[scheme.format]
        scale = torch.where(scale == 0, torch.finfo(values.dtype).eps, scale)
    return _nearest(values / scale, scheme.format) * scale


def rounded_cache(kept: Tensor, scheme: CacheScheme, part: Part) -> Tensor:
    """Return keys or values ``[batch, heads, tokens, channels]`` as a scheme rounds them.

    Raises:
        ValueError: calibration has not found the scales.
    """
    scale = torch.tensor(scheme.scales(part), dtype=kept.dtype)
    if len(scale) > 1:
        scale = scale.view(kept.shape[1], 1, kept.shape[3])
    return _nearest(kept / scale, scheme.format) * scale


def input_tensor_scale(scheme: InputScheme) -> Tensor:
    """Return the factor of the scales of nvfp4's groups, float32 ``[1]``.

    It is that of the greatest magnitude, rounded up to a power of two: inputs up to twice as large
    as any that calibration saw still have a scale.

    Raises:
        ValueError: calibration has not been run.
    """
    if scheme.largest is None:
        raise ValueError(f"{scheme} has not been calibrated")
    exact = torch.tensor([scheme.largest / (_E4M3_LARGEST * E2M1_LARGEST)], dtype=torch.float64)
    power = torch.exp2(exact.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil())
    return torch.where(exact > 0, power, 1.0).to(torch.float32)


def round_inputs_of(layer: nn.Module, scheme: InputScheme) -> None:
    """Make a linear layer round its inputs from now on."""

    def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded_inputs(args[0], scheme), *args[1:])

    layer.register_forward_pre_hook(rounded)


def _nearest(steps: Tensor, name: str) -> Tensor:
    if name in _ENDS:
        return steps.clamp(*_ENDS[name]).round()
    return steps.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn).to(steps.dtype)


def _nvfp4(groups: Tensor, scheme: InputScheme) -> Tensor:
    whole = input_tensor_scale(scheme)
    largest = groups.abs().amax(-1, keepdim=True).to(torch.float32)
    exact = (largest / E2M1_LARGEST / whole).clamp(max=_E4M3_LARGEST)
    stored = exact.to(torch.float8_e4m3fn).to(torch.float32)
    scale = (torch.where(stored == 0, _E4M3_LEAST, stored) * whole).to(groups.dtype)
    return nearest_e2m1(groups / scale) * scale


def _mxfp4(groups: Tensor, _: InputScheme) -> Tensor:
    largest = groups.abs().amax(-1, keepdim=True).to(torch.float32)
    mantissa, exponent = torch.frexp(largest)  # the mantissa is from a half to one
    exponent = exponent - 1 + (2 * mantissa >= _RAISED).int() - _E2M1_EXPONENT
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))
    scale = torch.where(largest == 0, 1.0, scale).to(groups.dtype)
    return nearest_e2m1(groups / scale) * scale
