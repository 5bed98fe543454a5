"""What attention keeps of tokens: keys and values, seen or rounded as a network runs.

A network of ``transformers`` gives the keys and values of new tokens to its cache, which gives back
those of all tokens. Here something else takes the cache's place, so that no class has to be known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compressor.models.rounded_inputs import rounded_cache
from compressor.types.rounded_inputs import CacheScheme, Part

PROJECTIONS: Mapping[str, tuple[Part, ...]] = {
    "k_proj": ("keys",),
    "v_proj": ("values",),
    "qkv_proj": ("keys", "values"),
    "kv_b_proj": ("keys", "values"),
}
"""Layers of attention that write what it keeps. Only attention with one has scales in the layout of
compressed-tensors 0.20."""

_CACHES = ("cache", "past_key_values", "past_key_value")  # transformers 5.24, before, long before

ChangeCache = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes keys and values ``[batch, heads, tokens, channels]``, and returns what is kept."""


def keeps_cache(module: nn.Module) -> bool:
    """Return whether a module is attention whose cache has a place for scales."""
    named = "attention" in type(module).__name__.lower()
    return named and any(hasattr(module, name) for name in PROJECTIONS) and bool(_argument(module))


def change_cache(attention: nn.Module, change: ChangeCache) -> Callable[[], None]:
    """Make a function change the keys and values of attention before it reads them.

    It sees the tokens at hand only: the network is run without a cache of its own.

    Returns:
        What ends it.
    """
    argument, cache = _argument(attention), _Changing(change)

    def instead(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, argument: cache}

    return attention.register_forward_pre_hook(instead, with_kwargs=True).remove


def round_cache_of(attention: nn.Module, scheme: CacheScheme) -> None:
    """Make attention keep rounded keys and values from now on."""

    def rounded(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rounded_cache(keys, scheme, "keys"), rounded_cache(values, scheme, "values")

    change_cache(attention, rounded)


class _Changing:
    """Stands in for a cache: returns the keys and values that it is given, changed."""

    def __init__(self, change: ChangeCache):
        self._change = change

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values that attention reads."""
        return self._change(keys, values)


def _argument(module: nn.Module) -> str:
    """Return the name of a module's cache argument; empty if it takes none."""
    takes = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in takes), "")
