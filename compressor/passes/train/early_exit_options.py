"""Options of early exits."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from compressor.types.options import Options

Confidence: TypeAlias = Literal["probability", "entropy", "margin"]
Head: TypeAlias = Literal["linear", "norm-linear"]


class Exit(Options):
    """A place where samples may leave the network."""

    after: str = Field(
        description="a layer, or the part of the network that several are in, such as layer2 for "
        "layer2.0.conv1 and layer2.1.conv2; the exit lies after its last layer, and the "
        "normalization, residual sum and activation that directly follow"
    )
    head: Head = Field(
        default="linear",
        description="linear: means over places or tokens, and a linear layer; norm-linear: with a "
        "layer norm between the two",
    )
    grid: int = Field(
        default=4,
        ge=1,
        description="pictures are averaged over a grid of so many by so many parts, or the most "
        "below that their height and width divide into; 1 is the mean over all places",
    )
