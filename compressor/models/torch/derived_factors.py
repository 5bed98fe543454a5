"""Factors that a class makes of a size that changes.

Attention divides by the root of the size of its heads. Where heads lose channels, as the only head
of a stage does, the graph still divides by the root of the old size. The class takes that of the
new one, when it is built or as it runs, and has no other place for the old factor. So a layer whose
output the factor multiplies takes the ratio of the two: queries or keys. Which layers these are, is
not known: each is tried, and the outputs decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from math import isclose, sqrt

from torch import nn

from compressor.models.torch.parametrized import weight_parameter
from compressor.models.torch.size_attributes import Attributes, Value, readings, stated
from compressor.models.torch.smaller_module import (
    MOST_READINGS,
    Agreement,
    fitting_attributes,
    present,
    removal_masks,
    set_attributes,
)
from compressor.types.channels import Units

_ROOTS = (-0.5, 0.5)


def fitted(
    module: nn.Module,
    smaller: nn.Module,
    kept: Mapping[str, Mapping[int, Units]],
    agreement: Agreement,
) -> tuple[Attributes, frozenset[str]] | None:
    """Set sizes of a module with smaller tensors, and the factors that its class makes of them.

    Args:
        smaller: its copy with fewer channels; on success it runs like its graph.
        kept: the positions that remain, by parameter and axis.

    Returns:
        The attributes that were set, and the names of the parameters that took up a changed
        factor, which are not the graph's any more. ``None`` where nothing agrees.
    """
    sizes = fitting_attributes(module, smaller, kept, agreement)
    factors = {} if sizes is None else _stored_factors(module, sizes)
    if sizes is not None and not factors:
        return sizes, frozenset()
    runs = sizes or _running(module, smaller, kept, agreement)
    if runs is None:
        return None
    merged = {path: {**values, **factors.get(path, {})} for path, values in runs.items()}
    set_attributes(smaller, merged)
    for ratios in _ratios(module, runs, factors):
        for scaled in _scalings(smaller, ratios):
            if agreement.holds(smaller):
                return merged, scaled
    set_attributes(smaller, present(module, merged))
    if sizes is None:
        return None
    set_attributes(smaller, sizes)
    return sizes, frozenset()


def _running(
    module: nn.Module,
    smaller: nn.Module,
    kept: Mapping[str, Mapping[int, Units]],
    agreement: Agreement,
) -> Attributes | None:
    """Return the first reading by which the module runs, whatever it computes."""
    masks = removal_masks(module, kept)
    for attributes in islice(readings(module, masks), MOST_READINGS):
        set_attributes(smaller, attributes)
        runs = agreement.fits(smaller)
        set_attributes(smaller, present(module, attributes))
        if runs:
            return attributes
    return None


def _stored_factors(module: nn.Module, sizes: Attributes) -> dict[str, dict[str, Value]]:
    """Return the factors that modules hold and that are a root of a size that changes."""
    parts = dict(module.named_modules())
    factors: dict[str, dict[str, Value]] = {}
    for path, values in sizes.items():
        held = {n: v for n, v in vars(parts[path]).items() if type(v) is float}
        for name, new in values.items():
            old = stated(parts[path], name)
            if not isinstance(old, int) or not isinstance(new, int):
                continue
            for factor, value in held.items():
                for root in _ROOTS:
                    if isclose(value, old**root, rel_tol=1e-9):
                        factors.setdefault(path, {})[factor] = new**root
    return factors


def _ratios(
    module: nn.Module, sizes: Attributes, factors: Mapping[str, Mapping[str, Value]]
) -> Iterator[dict[str, float]]:
    """Yield what makes up for a changed factor, by the module's path.

    Without factors that modules hold, each size may be what they take the root of.
    """
    parts = dict(module.named_modules())
    if factors:
        path_ratios = {}
        for path, values in factors.items():
            name, new = next(iter(values.items()))
            path_ratios[path] = vars(parts[path])[name] / new
        yield path_ratios
        return
    found: dict[tuple[type, str], dict[str, float]] = {}
    for path, values in sizes.items():
        for name, new in values.items():
            old = stated(parts[path], name)
            if isinstance(old, int) and isinstance(new, int) and _layers(parts[path]):
                found.setdefault((type(parts[path]), name), {})[path] = sqrt(new / old)
    # Those of heads first.
    yield from (found[key] for key in sorted(found, key=lambda key: "head" not in key[1]))


def _layers(part: nn.Module) -> list[str]:
    weights = {name: weight_parameter(child) for name, child in part.named_children()}
    return [name for name, weight in weights.items() if weight is not None and weight.ndim > 1]


def _scalings(smaller: nn.Module, ratios: Mapping[str, float]) -> Iterator[frozenset[str]]:
    """Multiply the outputs of one layer in each module, for each of their layers in turn.

    The layer is as it was when the next one is asked for. Tensors are replaced, not changed, since
    other modules and graphs share them.

    Yields:
        The names of the parameters that are multiplied.
    """
    parts = dict(smaller.named_modules())
    names = dict.fromkeys(name for path in ratios for name in _layers(parts[path]))
    for name in names:
        before: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
        for path, ratio in ratios.items():
            layer = getattr(parts[path], name, None)
            if not isinstance(layer, nn.Module):
                continue
            for own, parameter in layer.named_parameters(recurse=False):
                before[f"{path}.{name}.{own}".lstrip(".")] = (layer, own, parameter)
                scaled = (parameter.detach() * ratio).to(parameter.dtype)
                setattr(layer, own, nn.Parameter(scaled, requires_grad=parameter.requires_grad))
        yield frozenset(before)
        for layer, own, parameter in before.values():
            setattr(layer, own, parameter)
