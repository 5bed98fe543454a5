"""Options of ``quantize-static``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compressor.types.options import Options
from compressor.types.passes import LayerRule

Bits = Literal[4, 8]


class WeightOptions(Options):
    """How weights are quantized."""

    bits: Bits = Field(default=8, description="width of a weight")
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale for each output channel, or one a tensor"
    )
    symmetric: bool = Field(default=True, description="zero point 0")
    range: Literal["min-max", "mse"] = Field(
        default="min-max", description="full range, or the one of least squared error"
    )
    rounding: Literal["gptq", "nearest"] = Field(
        default="gptq",
        description="gptq minds the layer's output: each weight's rounding error is made up for "
        "by the weights after it (arXiv:2210.17323)",
    )


class ActivationOptions(Options):
    """How activations are quantized."""

    bits: Bits = Field(default=8, description="width of an activation")
    observer: Literal[
        "mse", "min-max", "moving-average", "percentile", "entropy", "extreme-value"
    ] = Field(
        default="mse",
        description="how the range is chosen from the calibration data; extreme-value where large "
        "values carry the answer and calibration data are few, as with detectors",
    )
    symmetric: bool | Literal["auto"] = Field(
        default="auto",
        description="zero point 0; auto: only where an export's target demands it",
    )
    percentile: float | None = Field(
        default=None, gt=50, le=100, description="for observer percentile: share of values inside"
    )
    exact_pixels: bool = Field(
        default=True,
        description="where the input is normalized 8-bit images, let its codes be the pixels: "
        "no rounding; where channels are normalized differently, for three cheap operators",
    )


class StaticRule(LayerRule):
    """Per-layer settings of ``quantize-static``."""

    bits: Bits | None = Field(default=None, description="width of these layers' weights")
    granularity: Literal["channel", "tensor"] | None = Field(
        default=None, description="granularity of these layers' weights"
    )
    activation_bits: Bits | None = Field(
        default=None,
        description="width of what these layers read; where others read it, too, the widest counts",
    )
