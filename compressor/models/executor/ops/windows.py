"""The geometry that convolutions and pools share: strides, dilations and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from compressor.models.executor.node import NodeView

_AUTO = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Pads:
    """Rows added before and after each spatial axis; negative ones are cut off."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether torch's own padding can express these."""
        return self.before == self.after and min(self.before, default=0) >= 0

    def apply(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Pad the last axes of a tensor with a value."""
        if not any(self.before) and not any(self.after):
            return x
        pairs = zip(reversed(self.before), reversed(self.after), strict=True)
        return functional.pad(x, [amount for pair in pairs for amount in pair], value=value)

    def __add__(self, extra: Sequence[int]) -> Pads:
        """Return these pads with more rows after each axis."""
        return Pads(self.before, tuple(a + b for a, b in zip(self.after, extra, strict=True)))


@dataclass(frozen=True)
class Window:
    """How a kernel slides over the spatial axes, as far as the attributes say."""

    auto_pad: str
    explicit_pads: tuple[int, ...] | None
    explicit_strides: tuple[int, ...] | None
    explicit_dilations: tuple[int, ...] | None

    @staticmethod
    def of(node: NodeView) -> Window:
        """Read the attributes of a convolution or a pool."""
        return Window(
            node.choice("auto_pad", _AUTO, "NOTSET"),
            node.integers("pads"),
            node.integers("strides"),
            node.integers("dilations"),
        )

    def strides(self, rank: int) -> tuple[int, ...]:
        """Return one stride a spatial axis."""
        return self.explicit_strides or (1,) * rank

    def dilations(self, rank: int) -> tuple[int, ...]:
        """Return one dilation a spatial axis."""
        return self.explicit_dilations or (1,) * rank

    def pads(self, size: Sequence[int], kernel: Sequence[int]) -> Pads:
        """Return the padding for an input of this spatial size.

        ``SAME`` means ceil(size / stride) outputs, the odd row going to the end (upper) or to
        the beginning (lower).
        """
        rank = len(size)
        if self.auto_pad == "NOTSET":
            pads = self.explicit_pads or (0,) * (2 * rank)
            return Pads(pads[:rank], pads[rank:])
        if self.auto_pad == "VALID":
            return Pads((0,) * rank, (0,) * rank)
        totals = []
        windows = zip(size, kernel, self.strides(rank), self.dilations(rank), strict=True)
        for length, width, stride, dilation in windows:
            outputs = -(-length // stride)
            totals.append(max((outputs - 1) * stride + (width - 1) * dilation + 1 - length, 0))
        return split_pads(totals, upper=self.auto_pad == "SAME_UPPER")


def split_pads(totals: Sequence[int], *, upper: bool) -> Pads:
    """Halve the padding of each axis; an odd row goes to the end (upper) or to the beginning."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - total // 2 for total in totals)
    return Pads(smaller, larger) if upper else Pads(larger, smaller)
