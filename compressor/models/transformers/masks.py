"""Attention masks of ``transformers`` that hide nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
