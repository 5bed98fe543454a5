"""The vectors that a layer multiplies its weight with, place by place, and its outputs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Window:
    """The window of a convolution, one number for each spatial axis.

    Attributes:
        pads: zeros before and after, as ONNX orders them: all beginnings, then all ends.
        dilations: steps between the elements of a patch.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]


def pairs(
    inputs: Tensor, outputs: Sequence[Tensor], window: Window | None, wanted: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the vectors that a layer multiplies its weight with, and the outputs at these places.

    They are looked at on an even grid, for neighbours are almost the same.

    >>> x, (y,) = pairs(torch.zeros(2, 5, 3), [torch.zeros(2, 5, 7)], None, wanted=9)
    >>> x.shape, y.shape
    (torch.Size([2, 5, 3]), torch.Size([2, 5, 7]))

    Args:
        inputs: of a convolution ``[batch, channels, *lengths]``, else ``[batch, ..., columns]``.
        outputs: values in the form of the layer's output, with its batch and its lengths.
        wanted: places to look at in each sample, if it has as many.

    Returns:
        ``[batch, places, columns]``, and ``[batch, places, rows]`` of each output.
    """
    if window is None:
        flat = [v.reshape(len(v), prod(v.shape[1:-1]), v.shape[-1]) for v in (inputs, *outputs)]
        step = max(1, flat[0].shape[1] // wanted)
        first, *rest = (v[:, ::step] for v in flat)
        return first, rest
    rank, lengths = len(window.kernel), outputs[0].shape[2:]
    step = max(1, int((prod(lengths) / wanted) ** (1 / rank)))
    grid = (slice(None), slice(None), *[slice(None, None, step)] * rank)
    chosen = [v[grid].flatten(2).transpose(1, 2) for v in outputs]
    ends = zip(window.pads[:rank], window.pads[rank:], strict=True)
    padded = functional.pad(inputs, [n for pair in reversed(list(ends)) for n in pair])
    for axis, (length, stride, gap) in enumerate(
        zip(window.kernel, window.strides, window.dilations, strict=True)
    ):
        padded = padded.unfold(2 + axis, gap * (length - 1) + 1, stride * step)[..., ::gap]
    order = (0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))
    patches = padded.permute(order)
    columns = inputs.shape[1] * prod(window.kernel)
    return patches.reshape(len(inputs), -1, columns), chosen
