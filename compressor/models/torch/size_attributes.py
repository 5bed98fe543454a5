"""New values of modules' integer attributes when channels are removed.

For the usual layers they are certain. Elsewhere an integer such as 64 may be a width, a number of
heads or a head's size, so it has several readings, one of which is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import type_before_parametrizations

from compressor.models.torch.parametrized import weight_parameter
from compressor.types.channels import Flags

Size: TypeAlias = "int | tuple[int, ...] | list[int]"
Value: TypeAlias = "Size | float"
Attributes: TypeAlias = Mapping[str, Mapping[str, Value]]
"""New values, by the module's path and the attribute's name."""
Masks: TypeAlias = Mapping[int, Mapping[int, Flags]]
"""The positions that remain on each axis that becomes shorter, by the tensor's ``id``."""

_STREAM = re.compile(r"model|embd|embed|hidden_size|^dim$|input|^in_")
"""What is usually the width of the residual stream, where a layer's own width is the same."""
_BEFORE = re.compile(r"before|left|first|front")
_AFTER = re.compile(r"after|right|last|back")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SIZES = re.compile(r"dim|size|width|features|channels|d_kv")
_OTHERS = re.compile(
    r"idx|index|bucket|layer|depth|kernel|strid|pad|dilat|window|patch|shift|image|max_|position|vocab"
)
_CONFIGURED = re.compile(r"head|dim|size|width|embd|inner|hidden|features|channels|d_(kv|ff|model)")
"""Sizes in a configuration that modules of ``transformers`` hold, and some read as they run."""
CONFIG = "config."
# Parametrizations, whose numbers are axes. Their kernels check no shapes: another axis made
# torch._weight_norm write outside of its memory.
_COMPUTES_WEIGHTS = "torch.nn.utils."

Kind: TypeAlias = tuple[str, str, int]
"""How a value is read, and the tensor (relative to the module) and axis that it belongs to."""
_KEEP: Kind = ("keep", "", 0)


@dataclass(frozen=True)
class _Choice:
    """An attribute that some reading changes, in one module."""

    path: str
    key: tuple[str, str]
    value: Size
    options: Mapping[Kind, Size]
    ambiguous: bool


def stated(part: nn.Module, name: str) -> Value:
    """Return an attribute's value; that of a configuration by ``config.NAME``."""
    holder: object = part
    for step in name.split("."):
        holder = vars(holder)[step]
    return holder  # type: ignore[return-value]  # what readings change are sizes


def readings(module: nn.Module, masks: Masks, *, configured: bool = False) -> Iterator[Attributes]:
    """Yield new attribute values for every possible reading, likelier readings first.

    An attribute is read in the same way in all modules of a class.

    Args:
        masks: the positions that remain on its tensors' axes.
        configured: also read the sizes in the configurations that modules hold, ``config.NAME``.
    """
    certain: dict[str, dict[str, Size]] = {}
    choices: list[_Choice] = []
    for path, part in module.named_modules():
        plain = _certain_values(part, masks)
        if plain is not None:
            certain[path] = plain
            continue
        if type_before_parametrizations(part).__module__.startswith(_COMPUTES_WEIGHTS):
            continue
        choices += _choices(path, part, _around(module, path), masks, configured)
    orders: dict[tuple[str, str], list[Kind]] = {}
    for choice in choices:
        order = orders.setdefault(choice.key, [])
        order += [kind for kind in choice.options if kind not in order]
    for key, order in orders.items():
        orders[key] = sorted([*order, _KEEP], key=lambda kind: _rank(key[1], kind[0]))
    seen: list[Attributes] = []
    for preferences in _combinations(choices, orders):
        attributes = {path: dict(values) for path, values in certain.items()}
        for choice in choices:
            options = {_KEEP: choice.value, **choice.options}
            order = preferences[choice.key]
            value = next((options[kind] for kind in order if kind in options), choice.value)
            if value != choice.value:
                attributes.setdefault(choice.path, {})[choice.key[1]] = value
        attributes = {path: values for path, values in attributes.items() if values}
        if attributes not in seen:
            seen.append(attributes)
            yield attributes


def _combinations(
    choices: list[_Choice], orders: Mapping[tuple[str, str], list[Kind]]
) -> Iterator[Mapping[tuple[str, str], list[Kind]]]:
    """Yield orders of preference: the usual one, cautious ones, ones by axis, then single changes.

    In those by axis, all attributes prefer readings of the same axis.
    """
    ambiguous = {choice.key for choice in choices if choice.ambiguous}
    streams = {key for key in ambiguous if _STREAM.search(key[1])}
    heads = {key for key in orders if "head" in key[1]}
    for kept in (streams, ambiguous - streams, ambiguous, heads, orders.keys()):
        yield {key: [_KEEP] if key in kept else order for key, order in orders.items()}
    axes = dict.fromkeys(kind[1:] for order in orders.values() for kind in order if kind != _KEEP)
    for axis in axes:
        yield {
            key: sorted(order, key=lambda kind: (_rank(key[1], kind[0]), kind[1:] != axis))
            for key, order in orders.items()
        }
    for key, order in orders.items():
        for kind in order[1:]:
            yield {**orders, key: [kind, *(other for other in order if other != kind)]}


def _rank(name: str, kind: str) -> int:
    """Return the place of a kind of reading among those of an attribute of this name."""
    name = name.removeprefix(CONFIG)
    order = ["whole", "split", "each", "block", "keep", "blocks", "first", "last"]
    first: list[str] = []
    if _OTHERS.search(name) or ("group" in name and "key_value" in name):
        first = ["keep"]
    elif ("head" in name and not name.startswith("all_")) or name == "d_kv":
        first = ["block", "keep"] if _SIZES.search(name) else ["blocks", "keep"]
    elif _BEFORE.search(name) or _AFTER.search(name):
        first = ["first"] if _BEFORE.search(name) else ["last"]
    return [*first, *(k for k in order if k not in first)].index(kind)


def _choices(
    path: str, part: nn.Module, tensors: Mapping[str, Tensor], masks: Masks, configured: bool
) -> Iterator[_Choice]:
    axes = [
        (name, axis, mask)
        for name, tensor in tensors.items()
        for axis, mask in masks.get(id(tensor), {}).items()
    ]
    if not axes:
        return
    unchanged = {
        length
        for tensor in tensors.values()
        for axis, length in enumerate(tensor.shape)
        if axis not in masks.get(id(tensor), {})
    }
    sizes = vars(part) | (_configuration(part) if configured else {})
    for name, value in sizes.items():
        if not _is_size(value):
            continue
        options = {
            (kind, tensor, axis): new
            for tensor, axis, mask in axes
            for kind, new in _options(value, mask)
        }
        if options:
            key = (f"{type(part).__module__}.{type(part).__qualname__}", name)
            ambiguous = isinstance(value, int) and value in unchanged
            yield _Choice(path, key, value, options, ambiguous)


def _around(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Return the tensors that a part sees; where it has none, as one that only reshapes, those of
    the nearest module around it that has some.
    """
    tensors: dict[str, Tensor] = {}
    while not tensors:
        part = module.get_submodule(path)
        tensors = dict(_in_sight(part, "")) or dict(part.named_parameters())
        if not path:
            break
        path = path.rpartition(".")[0]
    return tensors


def _configuration(part: nn.Module) -> dict[str, object]:
    """Return the entries of a module's configuration that may be sizes, by ``config.NAME``.

    One that cannot be changed has none: a property, or the frozen dictionary of ``diffusers``.
    """
    held = vars(part).get(CONFIG[:-1])
    values = {} if isinstance(held, Mapping) else getattr(held, "__dict__", {})
    named = {n: v for n, v in values.items() if _CONFIGURED.search(n) and not _OTHERS.search(n)}
    return {CONFIG + name: value for name, value in named.items()}


def _in_sight(part: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module and of its children, and of the children of containers."""
    yield from _own_tensors(part, prefix)
    for name, child in part.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _in_sight(child, f"{prefix}{name}.")
        else:
            yield from _own_tensors(child, f"{prefix}{name}.")


def _own_tensors(part: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [
        *part.named_parameters(recurse=False, remove_duplicate=False),
        *part.named_buffers(recurse=False, remove_duplicate=False),
    ]:
        yield prefix + name, tensor


def _is_size(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(type(x) is int and x > 0 for x in value)
    return type(value) is int and value > 1


def _options(value: Size, mask: Flags) -> Iterator[tuple[str, Size]]:
    """Yield new values for each reading of a value that fits an axis, with the kind of reading.

    ``whole`` is the axis's length; ``block`` the length of blocks that lose equally much or all,
    such as queries, keys and values; ``blocks`` a number of blocks, such as heads; ``split`` the
    lengths of consecutive parts; ``each`` a list of lengths of which this is one, such as those of
    a network's stages; ``first`` and ``last`` that of one at an end.
    """
    length = len(mask)
    if not isinstance(value, int):
        if sum(value) == length:
            starts = [sum(value[:i]) for i in range(len(value))]
            parts = [
                int(mask[start : start + size].sum())
                for start, size in zip(starts, value, strict=True)
            ]
            yield "split", type(value)(parts)
        elif length in value:
            yield "each", type(value)(int(mask.sum()) if n == length else n for n in value)
        return
    if value == length:
        yield "whole", int(mask.sum())
    if length % value == 0:
        left = _left(mask.reshape(-1, value))
        if left is not None:
            yield "block", left[1]
    if length % value == 0 and value < length:
        left = _left(mask.reshape(value, -1))
        if left is not None:
            yield "blocks", left[0]
    if value < length:
        yield "first", int(mask[:value].sum())
        yield "last", int(mask[-value:].sum())


def _left(blocks: Flags) -> tuple[int, int] | None:
    """Return how many blocks are left and the length of each; ``None`` where lengths differ.

    Args:
        blocks: ``[blocks, length]``, what remains of each. Those of which nothing does are lost.
    """
    counts = blocks.sum(1)
    counts = counts[counts > 0]
    if len(counts) == 0 or (counts != counts[0]).any():
        return None
    return len(counts), int(counts[0])


def _certain_values(part: nn.Module, masks: Masks) -> dict[str, Size] | None:
    """Return changed attributes of a PyTorch or ``transformers`` layer; ``None`` for other modules.

    A layer without tensors counts as another module, since only its surroundings show its sizes.
    """
    if isinstance(part, nn.RNNBase | nn.RNNCellBase):
        return _changed(part, _recurrent_values(part, masks))
    weight = weight_parameter(part)
    if weight is None:
        weight = getattr(part, "running_mean", None)
    if not isinstance(weight, Tensor):
        return None
    axes = masks.get(id(weight), {})
    shape = [int(axes[i].sum()) if i in axes else n for i, n in enumerate(weight.shape)]
    values: dict[str, Size] | None = None
    if isinstance(part, _ConvNd):
        groups = _groups(part.groups, axes.get(0))
        first, second = shape[0], shape[1] * groups
        across = isinstance(part, _ConvTransposeNd)
        values = {
            "in_channels": first if across else second,
            "out_channels": second if across else first,
            "groups": groups,
        }
    elif isinstance(part, nn.Linear):
        values = {"out_features": shape[0], "in_features": shape[1]}
    elif isinstance(part, _NormBase):
        values = {"num_features": shape[0]}
    elif isinstance(part, nn.LayerNorm | nn.RMSNorm):
        values = {"normalized_shape": tuple(shape)}
    elif isinstance(part, nn.GroupNorm):
        values = {"num_groups": _groups(part.num_groups, axes.get(0)), "num_channels": shape[0]}
    elif isinstance(part, nn.Embedding):
        values = {"num_embeddings": shape[0], "embedding_dim": shape[1]}
    elif isinstance(part, nn.PReLU):
        values = {"num_parameters": shape[0]}
    elif type(part).__name__ == "Conv1D" and {"nf", "nx"} <= vars(part).keys():
        values = {"nx": shape[0], "nf": shape[1]}  # transformers' linear layer, transposed
    return None if values is None else _changed(part, values)


def _changed(part: nn.Module, values: Mapping[str, Size]) -> dict[str, Size]:
    return {name: new for name, new in values.items() if new != getattr(part, name)}


def _recurrent_values(part: nn.Module, masks: Masks) -> dict[str, Size]:
    """Return the sizes of a recurrent layer, all of whose directions and layers share one state."""
    first = "_l0" if isinstance(part, nn.RNNBase) else ""
    entry, state = (getattr(part, f"weight_{kind}{first}") for kind in ("ih", "hh"))
    lengths = [
        int(masks[id(w)][1].sum()) if 1 in masks.get(id(w), {}) else w.shape[1]
        for w in (entry, state)
    ]
    return {"input_size": lengths[0], "hidden_size": lengths[1]}


def _groups(groups: int, mask: Flags | None) -> int:
    if mask is None:
        return groups
    return int(mask.reshape(groups, -1).any(1).sum())
