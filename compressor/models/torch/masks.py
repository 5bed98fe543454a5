"""Attention masks while a module is traced: none that forward has not, and none looked into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_MAKE = (torch.ones, torch.ones_like, Tensor.new_ones)
_CAST = (Tensor.to, Tensor.bool, Tensor.int, Tensor.long, Tensor.float)
_LOOKS = ("shape", "ndim", "dtype", "device")
_LOOK = (Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in _LOOKS))
_MODULE, _ASKS = "transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"


@contextmanager
def without_idle_masks() -> Iterator[None]:
    """Make no mask while a module is traced where forward makes none.

    Without a mask of padding and without a window, every position sees all others. The library
    then attends without a mask, but makes one for exporters, as it may not look into a mask of
    padding there. Where queries are fewer than keys (Informer, Autoformer), it does not even fit.
    A mask of padding that forward makes of ones for want of another says nothing either.
    """
    module = sys.modules.get(_MODULE)
    asked = getattr(module, _ASKS, None)
    if asked is None:
        yield
        return

    def idle(
        padding_mask: Any, kv_length: Any, local_attention_size: Any = None, *more: Any
    ) -> bool:
        unpadded = padding_mask is None or ones.are(padding_mask)
        nothing = unpadded and local_attention_size is None
        return nothing or bool(asked(padding_mask, kv_length, local_attention_size, *more))

    ones = _Ones()
    setattr(module, _ASKS, idle)
    try:
        with ones:
            yield
    finally:
        setattr(module, _ASKS, asked)


class _Ones(TorchFunctionMode):
    """Knows the tensors that are ones alone: made so, and at most cast since.

    What any other function is given may be changed through it, and is no longer known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}

    def are(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKE or (func in _CAST and self.are(args[0])):
            self._known[id(made)] = made
        elif func not in _LOOK:
            for given in tree_leaves((args, kwargs)):
                self._known.pop(id(given), None)
        return made


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
