"""Entropy-constrained codebooks: which value each weight takes when bits have a price.

P. Chou, T. Lookabaugh and R. Gray, Entropy-constrained vector quantization, 1989 (IEEE Transactions
on Acoustics, Speech, and Signal Processing 37(1)), for scalars. The distortion of a weight is what
its error adds to the loss, by the diagonal of the Fisher information, as in Y. Choi, M. El-Khamy
and J. Lee, Towards the limit of network quantization, 2017 (arXiv:1612.01543). So one price, in
loss for each byte, trades weights of all layers against each other: how many are zero and how many
values the others have follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressor.passes.quantize.maths.kmeans import codebook, nearest

_ROUNDS = 3  # of Lloyd's algorithm at a price
_HALVINGS = 16  # of the interval in which the price lies, in logarithms
_LOWEST, _HIGHEST = 1e-13, 1e2  # loss for each byte
_BYTE = 8
_VALUE = 2.0  # bytes that a value of a codebook takes, shortened and coded


@dataclass(frozen=True)
class Coding:
    """A weight as places in a codebook.

    Attributes:
        weights: of any shape, float32.
        book: the values, float32 ``[K]``; one of them is zero.
        codes: which of them each weight takes, uint8 in the weights' shape.
        sensitivity: half of it times the square of an error is what that adds to the loss, in the
            weights' shape.
    """

    weights: Tensor
    book: Tensor
    codes: Tensor
    sensitivity: Tensor

    @property
    def counts(self) -> Tensor:
        """How many weights take each value, ``[K]``."""
        return torch.bincount(self.codes.flatten().long(), minlength=self.book.numel())

    @property
    def zero(self) -> int:
        """The place of the value that stands for zero: of those in use, the nearest to it."""
        away = torch.where(self.counts > 0, self.book.abs(), torch.inf)
        return int(away.argmin())

    @property
    def nbytes(self) -> float:
        """Bytes of an ideal order-0 coder (Shannon 1948), and of the values in use."""
        return coded_bytes(self.counts)


def coded_bytes(counts: Tensor) -> float:
    """Return the bytes of codes that occur so often each, ``[K]``, and of their codebook.

    >>> coded_bytes(torch.tensor([400, 400, 0]))
    104.0
    """
    used = counts[counts > 0].double()
    return float(-(used * (used / used.sum()).log2()).sum()) / _BYTE + _VALUE * used.numel()


def first_coding(weights: Tensor, bits: int) -> Coding:
    """Return weights in the ``2 ** bits`` values with the least squared error, one of them zero."""
    book = codebook(weights, 1 << bits, zero=True)
    padded = torch.full((1 << bits,), float("inf"))
    padded[: book.numel()] = book
    codes = nearest(weights, book)
    return Coding(weights, padded.nan_to_num(posinf=0.0), codes, torch.ones_like(weights))


def assigned(coding: Coding, price: float, zero: int) -> Tensor:
    """Return the value that each weight takes: uint8, in the weights' shape.

    The least of what its error costs and ``price`` times the bytes of its code, whose length
    follows from how often each value is taken now. What no weight takes is never taken again.

    Args:
        coding: the values, and how often they are taken.
        price: loss for each byte.
        zero: place of a value that may always be taken.
    """
    counts = coding.counts
    lengths = -(counts.clamp(min=0.5) / counts.sum()).log2() / _BYTE
    least = torch.full_like(coding.weights, torch.inf)
    codes = torch.zeros_like(coding.codes)
    half = coding.sensitivity / 2
    for place in range(counts.numel()):
        if counts[place] == 0 and place != zero:
            continue
        error = coding.weights - coding.book[place]
        cost = half * error * error + price * float(lengths[place])
        codes.masked_fill_(cost < least, place)
        least = torch.minimum(least, cost)
    return codes


def relaxed(coding: Coding, price: float) -> Coding:
    """Return a coding whose codes suit the values at a price, and the values the codes.

    A value moves to the mean of the weights that take it, weighted with their sensitivity; zero
    stays.
    """
    for _ in range(_ROUNDS):
        zero = coding.zero
        book = coding.book.clone()
        book[zero] = 0.0
        coding = replace(coding, book=book)
        coding = replace(coding, codes=assigned(coding, price, zero))
        size, places = book.numel(), coding.codes.flatten().long()
        heavy = coding.sensitivity.flatten().double()
        total = torch.bincount(places, heavy, size)
        moments = torch.bincount(places, heavy * coding.weights.flatten(), size)
        moved = torch.where(total > 0, moments / total, book.double()).float()
        moved[zero] = 0.0
        coding = replace(coding, book=moved)
    return coding


def price_for(codings: Mapping[str, Coding], nbytes: float) -> float:
    """Return the least price at which all weights together take no more than so many bytes."""
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        price = math.exp(middle)
        if sum(relaxed(coding, price).nbytes for coding in codings.values()) > nbytes:
            low = middle
        else:
            high = middle
    return math.exp(high)
