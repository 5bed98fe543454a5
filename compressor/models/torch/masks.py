"""Attention masks while a module is traced: none that forward has not, and none looked into."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MODULE, _ASKS = "transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"


@contextmanager
def without_idle_masks() -> Iterator[None]:
    """Make no mask while a module is traced where forward makes none.

    Without a mask of padding and without a window, every position sees all others. The library
    then attends without a mask, but makes one for exporters, as it may not look into a mask of
    padding there. Where queries are fewer than keys (Informer, Autoformer), it does not even fit.
    """
    module = sys.modules.get(_MODULE)
    asked = getattr(module, _ASKS, None)
    if asked is None:
        yield
        return

    def idle(
        padding_mask: Any, kv_length: Any, local_attention_size: Any = None, *more: Any
    ) -> bool:
        nothing = padding_mask is None and local_attention_size is None
        return nothing or bool(asked(padding_mask, kv_length, local_attention_size, *more))

    setattr(module, _ASKS, idle)
    try:
        yield
    finally:
        setattr(module, _ASKS, asked)


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Compute encoder layers of PyTorch operator by operator, with the masks that they are given.

    The exporter has no function for their kernel for inference, and cannot look into a mask to see
    whether it is the causal one, for which there is another kernel.
    """
    module: Any = nn.modules.transformer
    enabled, looks = torch.backends.mha.get_fastpath_enabled(), module._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    module._detect_is_causal_mask = _as_told
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        module._detect_is_causal_mask = looks


def _as_told(
    mask: Tensor | None,  # noqa: ARG001 - the library's arguments
    is_causal: bool | None = None,
    size: int | None = None,  # noqa: ARG001
) -> bool:
    return is_causal is True
