"""Sums, averages and maxima over rows of a table, as ``torch.nn.EmbeddingBag`` has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as f


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    **_training: Any,
) -> Tensor:
    """Return what :func:`torch.nn.functional.embedding_bag` does, ``[bags, features]``.

    Args:
        input: row numbers, ``[bags, length]``, or ``[numbers]`` of all bags one after the other.
        weight: the table, ``[rows, features]``.
        offsets: where each bag begins, ``[bags]``, if the input has one axis.
        mode: ``sum``, ``mean`` or ``max``; a bag without rows is zeros.
        per_sample_weights: factors of the rows in the shape of ``input``, for sums.
        include_last_offset: whether the end of the last bag follows in ``offsets``.
        padding_idx: a row that belongs to no bag.
    """
    rows = f.embedding(input, weight)
    member = None if padding_idx is None else input != padding_idx % weight.shape[0]
    if offsets is not None:
        inside = _members(input, offsets, include_last_offset)
        member = inside if member is None else inside & member
        rows = rows.unsqueeze(0)
    if mode == "max":
        return rows.amax(1) if member is None else _largest(rows, member)
    if member is None and per_sample_weights is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    factors = torch.ones_like(input, dtype=rows.dtype)
    factors = factors if per_sample_weights is None else per_sample_weights
    factors = factors if member is None else factors * member.to(rows.dtype)
    total = (factors.unsqueeze(1) @ rows).squeeze(1)
    return total if mode == "sum" else total / factors.sum(1, keepdim=True).clamp(min=1.0)


def _members(input: Tensor, offsets: Tensor, include_last: bool) -> Tensor:
    """Return which bag has which number, ``[bags, numbers]``."""
    places = torch.arange(input.shape[0], dtype=offsets.dtype, device=input.device)
    first = offsets[:-1] if include_last else offsets
    before = places < first.unsqueeze(1)
    if include_last:
        return ~before & (places < offsets[1:].unsqueeze(1))
    after = torch.cat([before[1:], torch.ones_like(before[:1])])  # it is before the next bag
    return ~before & after


def _largest(rows: Tensor, member: Tensor) -> Tensor:
    seen = member.unsqueeze(-1)
    largest = rows.masked_fill(~seen, float("-inf")).amax(1)
    return torch.where(member.any(1, keepdim=True), largest, torch.zeros_like(largest))
