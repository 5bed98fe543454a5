"""Widths that convolutions read in blocks of channels."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from compressor.types.channels import ChannelGroup, ChannelMap, Units
from compressor.types.layers import Layer

_TARGET = "ort-cpu"
_BLOCK = 8  # channels with AVX2; those with AVX-512 have twice as many
_RANKS = (3, 4)  # of weights: convolutions of sequences are written as those of images


def block_readers(layers: Sequence[Layer], targets: Collection[str]) -> frozenset[str]:
    """Return the weights of the layers that read channels in blocks where a model is exported for.

    ONNX Runtime computes convolutions without groups in blocks of channels if they read less than a
    block, or a multiple of four. Others copy each window, and turn the image out of blocks and
    back, so that fewer channels may take more time. What does not fill a block is computed in vain.
    """
    if _TARGET not in targets:
        return frozenset()
    return frozenset(
        layer.weight
        for layer in layers
        if layer.is_convolution
        and not layer.is_transposed_convolution
        and layer.groups == 1
        and len(layer.shape) in _RANKS
    )


def in_blocks(
    channels: ChannelMap, group: ChannelGroup, counts: Units, readers: Collection[str]
) -> Units:
    """Return the numbers of units with which a group's readers still compute in blocks.

    The least and the greatest remain in any case, so that no target gets out of reach.

    Args:
        counts: how many units may remain, ascending.
        readers: as :func:`block_readers` returns them.
    """
    fits = np.ones(len(counts), dtype=bool)
    for member in group.members:
        axis = channels.parameters[member.parameter][member.axis]
        if member.role != "input" or member.parameter not in readers or axis is None:
            continue
        sizes = np.bincount(axis[axis >= 0], minlength=channels.count)[group.units]
        if sizes.min() == sizes.max():  # one with parts of several sizes has no say
            widths = counts * int(sizes[0])
            fits &= (widths % _BLOCK == 0) | (widths < _BLOCK)
    fits[[0, -1]] = True
    return counts[fits]
