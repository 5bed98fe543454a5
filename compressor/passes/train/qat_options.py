"""Options of ``qat`` about what is quantized."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compressor.passes.quantize.static_options import Bits
from compressor.types.options import Options
from compressor.types.passes import LayerRule

WeightBits = Literal[2, 4, 8]


class QatWeightOptions(Options):
    """How weights are quantized."""

    bits: WeightBits = Field(default=8, description="width of a weight")
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale for each output channel, or one a tensor"
    )
    symmetric: bool = Field(default=True, description="zero point 0")
    range: Literal["min-max", "mse"] = Field(
        default="mse",
        description="what scales begin with: the full range, or the one of least squared error",
    )


class QatRule(LayerRule):
    """Per-layer settings of ``qat``."""

    bits: WeightBits | None = Field(default=None, description="width of these layers' weights")
    granularity: Literal["channel", "tensor"] | None = Field(
        default=None, description="granularity of these layers' weights"
    )
    activation_bits: Bits | None = Field(
        default=None,
        description="width of what these layers read; where others read it, too, the widest counts",
    )
