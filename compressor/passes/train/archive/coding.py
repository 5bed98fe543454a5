"""Entropy-constrained codebooks: which value each weight takes when bits have a price.

P. Chou, T. Lookabaugh and R. Gray, Entropy-constrained vector quantization, 1989 (IEEE Transactions
on Acoustics, Speech, and Signal Processing 37(1)), for scalars. The distortion of a weight is what
its error adds to the loss, by the diagonal of the Fisher information, as in Y. Choi, M. El-Khamy
and J. Lee, Towards the limit of network quantization, 2017 (arXiv:1612.01543). So one price, in
loss for each byte, trades weights of all layers against each other: how many are zero and how many
values the others have follows from it.

The coder of an archive knows how many weights of a row and of a column are zero, and so does the
length of a code here: where hardly any weight is left, one more is dear. Rows and columns that are
worth little die out as a whole, and cost nothing then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compressor.passes.quantize.maths.kmeans import nearest

_ROUNDS = 2  # of Lloyd's algorithm at a price
_HALVINGS = 14  # of the interval in which the price lies, in logarithms
_LOWEST, _HIGHEST = 1e-13, 1e2  # loss for each byte
_BYTE = 8
_VALUE = 2.0  # bytes that a value of a codebook takes, shortened and coded
_PRIOR = 4.0  # weights of the whole tensor's share of zeros that each row and column starts with
_ENOUGH = 16  # weights of a row or column from which on its own share of zeros is known


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

    @cached_property
    def counts(self) -> Tensor:
        """How many weights take each value, ``[K]``."""
        return torch.bincount(self.codes.flatten().long(), minlength=self.book.numel())

    @cached_property
    def zero(self) -> int:
        """The place of zero; where there is none, of the value in use that is the nearest to it."""
        away = torch.where((self.counts > 0) | (self.book == 0), self.book.abs(), torch.inf)
        return int(away.argmin())

    def lengths(self, zero: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bytes of codes, as they occur now.

        Args:
            zero: the place of zero.

        Returns:
            Bytes of being zero and of not being zero, both in the weights' shape, and what each
            value takes beside the latter, ``[K]``, its entry in the codebook shared among the
            weights that take it.
        """
        away = self.codes != zero
        share = expected(away)
        others = self.counts.double().index_fill(0, torch.tensor([zero]), 0)
        taken = others.clamp(min=0.5)
        values = -(taken / others.sum().clamp(min=1)).log2() / _BYTE + _VALUE / taken
        return (
            -torch.log2(1 - share) / _BYTE,
            -torch.log2(share) / _BYTE,
            values,
        )

    @cached_property
    def nbytes(self) -> float:
        """Bytes of an ideal coder that knows rows and columns, and of the values in use."""
        place = self.zero
        nothing, something, values = self.lengths(place)
        where = torch.where(self.codes != place, something, nothing).double().sum()
        others = self.counts.double().index_fill(0, torch.tensor([place]), 0)
        return float(where + (others * values).sum()) + _VALUE


def expected(away: Tensor) -> Tensor:
    """Return how likely each weight is not zero, by its row, its column and its place in a kernel.

    The shares of axes are combined as if they acted independently, as odds; each is drawn to that
    of the whole tensor, as if there were a few weights more that have it.

    Args:
        away: which weights are not zero, bool of any shape; all axes but the first two are one.

    Returns:
        Shares between 0 and 1, float32 in the same shape.
    """
    nonzero = (away.flatten(2) if away.ndim > 2 else away).float()
    whole = (nonzero.sum() + 0.5) / (nonzero.numel() + 1)
    odds = torch.logit(whole).expand(nonzero.shape)
    for axis, length in enumerate(nonzero.shape):
        size = nonzero.numel() // max(1, length)
        if length < 2 or size < _ENOUGH:
            continue
        others = [other for other in range(nonzero.ndim) if other != axis]
        share = (nonzero.sum(others, keepdim=True) + _PRIOR * whole) / (size + _PRIOR)
        odds = odds + torch.logit(share) - torch.logit(whole)
    return torch.sigmoid(odds).reshape(away.shape)


def first_coding(weights: Tensor, bits: int) -> Coding:
    """Return weights in ``2 ** bits - 1`` equidistant values, zero in their middle.

    With an entropy coder, equal steps are near the best at any rate (H. Gish and J. Pierce,
    Asymptotically efficient quantizing, 1968, IEEE Transactions on Information Theory 14(5)), and
    zero takes all that is near it.
    """
    most = (1 << (bits - 1)) - 1 or 1
    largest = float(weights.abs().max()) if weights.numel() else 0.0
    places = torch.arange(1 << bits, dtype=torch.float32) - most
    book = places.clamp(max=most) * (largest / most)
    codes = nearest(weights, book[: 2 * most + 1])
    return Coding(weights, book, codes, torch.ones_like(weights))


def assigned(coding: Coding, price: float, zero: int) -> Tensor:
    """Return the value that each weight takes: uint8, in the weights' shape.

    The least of what its error costs and ``price`` times the bytes of its code, whose length
    follows from how often each value is taken now. What no weight takes is never taken again. Where
    most weights of a row or column are not zero, one that becomes zero is dear, so that none would
    begin: rows and columns that are worth less than all of their bytes become zero as a whole.

    Args:
        coding: the values, and how often they are taken.
        price: loss for each byte.
        zero: place of a value that may always be taken.
    """
    counts = coding.counts
    nothing, something, values = coding.lengths(zero)
    half = coding.sensitivity / 2
    without = half * coding.weights * coding.weights
    least = without + price * (nothing - something)  # what all other values cost is left out
    codes = torch.full_like(coding.codes, zero)
    others = [n for n, count in enumerate(counts.tolist()) if count and n != zero]
    cheapest = price * min((float(values[n]) for n in others), default=math.inf)
    unsure = torch.nonzero(least.flatten() > cheapest).flatten()  # others are zero for sure
    weights, felt = coding.weights.flatten()[unsure], half.flatten()[unsure]
    lowest, chosen = least.flatten()[unsure], codes.flatten()[unsure]
    for place in others:
        error = weights - coding.book[place]
        cost = felt * error * error + price * float(values[place])
        chosen.masked_fill_(cost < lowest, place)
        lowest = torch.minimum(lowest, cost)
    codes.view(-1)[unsure] = chosen
    if codes.ndim > 1:
        bytes_taken = torch.where(codes == zero, nothing, something + values.float()[codes.long()])
        error = coding.weights - coding.book[codes.long()]
        _without_vain(codes, half * error * error + price * bytes_taken, without, zero)
    return codes


def _without_vain(codes: Tensor, cost: Tensor, without: Tensor, zero: int) -> None:
    """Make rows and columns zero, in place, that cost no less than they do as zeros.

    Args:
        codes: of two axes or more; those beyond belong to a column.
        cost: of each code: of its error and of its bytes.
        without: what the error costs if it is zero.
        zero: place of that value.
    """
    shape = (*codes.shape[:2], -1)
    held, gained = codes.view(shape), (without - cost).reshape(shape)
    vain = gained.sum((1, 2)) <= 0
    held[vain], gained[vain] = zero, 0.0
    held[:, gained.sum((0, 2)) <= 0] = zero


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
        coding = moved(replace(coding, codes=assigned(coding, price, zero)), zero)
    return coding


def moved(coding: Coding, zero: int) -> Coding:
    """Return a coding each of whose values suits the weights that take it, but for zero."""
    size, places = coding.book.numel(), coding.codes.flatten().long()
    heavy = coding.sensitivity.flatten().double()
    total = torch.bincount(places, heavy, size)
    moments = torch.bincount(places, heavy * coding.weights.flatten(), size)
    book = torch.where(total > 0, moments / total, coding.book.double()).float()
    book[zero] = 0.0
    return replace(coding, book=book)


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
