"""How far a student is from its teacher, one value a sample."""

from __future__ import annotations

from torch import Tensor, nn


def width_axis(rank: int, *, convolution: bool) -> int:
    """Return the axis of the channels of a layer's output, or of the width of tokens.

    Args:
        rank: how many axes the output has.
        convolution: a convolution made it; of three axes, channels are then the second.
    """
    return 1 if rank != 3 or convolution else 2


class Projection(nn.Module):
    """A trained linear map of one axis, which is a 1x1 convolution where that is the channels'.

    Args:
        axis: which one.
        width: its length.
        wanted: its length afterwards.
    """

    def __init__(self, axis: int, width: int, wanted: int):
        super().__init__()
        self._axis = axis
        self.linear = nn.Linear(width, wanted)

    def forward(self, values: Tensor) -> Tensor:
        """Map ``[..., width, ...]`` to ``[..., wanted, ...]``."""
        mapped: Tensor = self.linear(values.movedim(self._axis, -1))
        return mapped.movedim(-1, self._axis)
