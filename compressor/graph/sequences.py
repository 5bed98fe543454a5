"""Convolutions of sequences that ONNX Runtime computes faster as those of images with one row."""

from __future__ import annotations

from compressor.types.layers import Layer

_RANK = 3
_BLOCK = 16  # channels in a block, at most; fewer divide it
_FEWEST = 128  # products in an output, below which it takes longer to lay out than they do
_FILLED = 0.9  # share of the channels in blocks that are no filling


def gains_as_image(layer: Layer) -> bool:
    """Whether a convolution of sequences is one of the kernels that images alone have.

    ONNX Runtime's CPU provider computes images in blocks of channels. For sequences it copies each
    window, packs the weight and multiplies matrices, in every run: for one channel at a time where
    there are groups, and for at least 16 positions. As images with one row, depthwise convolutions
    took 0.17 to 0.49 of the time (AMD Zen 4, one thread), one of 258 windows of 256 samples at 4
    and 40 positions 0.53 and 0.38, and dense ones of a thousand positions 0.8 to 1.0.
    """
    if not layer.is_convolution or layer.is_transposed_convolution or len(layer.shape) != _RANK:
        return False
    rows, columns, taps = layer.shape
    if layer.groups > 1:
        depthwise = columns == 1 and rows == layer.groups and taps > 1
        whole = columns % _BLOCK == 0 and rows // layer.groups % _BLOCK == 0
        return whole or (depthwise and _is_filled(rows))
    lies_in_blocks = columns < _BLOCK // 2 or columns % 4 == 0
    return lies_in_blocks and _is_filled(rows) and columns * taps >= _FEWEST


def _is_filled(channels: int) -> bool:
    return channels >= _FILLED * -(-channels // _BLOCK) * _BLOCK
