"""Convolutions of sequences that ONNX Runtime computes faster as those of images with one row."""

from __future__ import annotations

from compressor.types.layers import Layer

_RANK = 3
_BLOCK = 16  # channels in a block, at most; fewer divide it
_FEWEST = 128  # products in an output, below which it takes longer to lay out than they do
_FILLED = 0.9  # share of the channels in blocks that are no filling
_PLACES = 16  # of an output, of which a product of matrices computes whole multiples
_FEWEST_FILLED = 2 * _FEWEST  # products in an output, below which zeros take longer to join
_FEW_ZEROS = 1.15  # times the channels, with which long sequences lose little


def gains_as_image(layer: Layer, places: int | None = None) -> bool:
    """Whether a convolution of sequences is one of the kernels that images alone have.

    Args:
        layer: any.
        places: of its output, where they are known.

    ONNX Runtime's CPU provider computes images in blocks of channels. For sequences it copies each
    window, packs the weight and multiplies matrices, in every run: for one channel at a time where
    there are groups, and for at least 16 places. As images with one row, depthwise convolutions
    took 0.17 to 0.49 of the time (AMD Zen 4, one thread), one of 258 windows of 256 samples at 4
    and 40 places 0.53 and 0.38, and dense ones of a thousand places 0.8 to 1.0.
    """
    if not layer.is_convolution or layer.is_transposed_convolution or len(layer.shape) != _RANK:
        return False
    rows, columns, taps = layer.shape
    if layer.groups > 1:
        depthwise = columns == 1 and rows == layer.groups and taps > 1
        whole = columns % _BLOCK == 0 and rows // layer.groups % _BLOCK == 0
        return whole or (depthwise and _is_filled(rows))
    lies_in_blocks = columns < _BLOCK // 2 or columns % 4 == 0 or filling(layer, places) > 0
    return lies_in_blocks and _is_filled(rows) and columns * taps >= _FEWEST


def filling(layer: Layer, places: int | None) -> int:
    """Return how many channels of zeros a dense convolution of sequences needs to gain as an image.

    Blocks of channels need a multiple of four. Filled, 129 channels (3 taps) took 0.37 to 0.57 of
    the time at 4 places, 0.91 to 0.95 at 40 and 1.03 to 1.07 at 400 (AMD Zen 4, one thread).

    Args:
        layer: a convolution of sequences without groups.
        places: of its output; unknown ones count as few, unless there are many zeros.
    """
    columns, products = layer.shape[1], layer.columns
    whole = -(-columns // _BLOCK) * _BLOCK
    if places is None:
        gains = whole <= _FEW_ZEROS * columns
    else:
        gains = places * whole < -(-places // _PLACES) * _PLACES * columns
    return -columns % 4 if gains and products >= _FEWEST_FILLED else 0


def _is_filled(channels: int) -> bool:
    return channels >= _FILLED * -(-channels // _BLOCK) * _BLOCK
