"""Fourier transforms; complex numbers are pairs in the last axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView, Table
from compressor.models.executor.ops.host import scalar
from compressor.models.executor.program import Op


def _complex(x: Tensor) -> Tensor:
    if x.shape[-1] == 2:
        return torch.view_as_complex(x.contiguous())
    return torch.complex(x[..., 0], torch.zeros_like(x[..., 0]))


def _dft(node: NodeView) -> Op:
    """The axis is an attribute before opset 20 and an input since."""
    inverse, one_sided = node.flag("inverse"), node.flag("onesided")
    old = node.integer("axis", 1) if node.opset < 20 else None
    node.on_host(1, 2)

    def run(x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
        chosen = old if old is not None else -2 if axis is None else scalar(axis)
        over = chosen if chosen >= 0 else chosen + 1  # the pairs are no axis of their own
        size = None if length is None else scalar(length)
        if not one_sided:
            transform: Callable[..., Tensor] = torch.fft.ifft if inverse else torch.fft.fft
            result: Tensor = torch.view_as_real(transform(_complex(x), n=size, dim=over))
            return result
        if inverse:
            real: Tensor = torch.fft.irfft(_complex(x), n=size, dim=over)
            return real.unsqueeze(-1)
        return torch.view_as_real(torch.fft.rfft(x[..., 0], n=size, dim=over))

    return run


def _stft(node: NodeView) -> Op:
    one_sided = node.flag("onesided", default=True)
    node.on_host(1, 3)

    def run(
        signal: Tensor,
        step: Tensor,
        window: Tensor | None = None,
        length: Tensor | None = None,
    ) -> Tensor:
        width = signal.shape[1]
        if length is not None:
            width = scalar(length)
        elif window is not None:
            width = window.shape[0]
        frames = signal.unfold(1, width, scalar(step)).movedim(-1, 2)
        if window is not None:
            frames = frames * window.reshape(1, 1, -1, 1)
        if one_sided:
            return torch.view_as_real(torch.fft.rfft(frames[..., 0], dim=2))
        return torch.view_as_real(torch.fft.fft(_complex(frames), dim=2))

    return run


SIGNAL: Table = {"DFT": _dft, "STFT": _stft}
