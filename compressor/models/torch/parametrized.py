"""Weights that a module computes by PyTorch's parametrizations, with fewer channels.

Weight norm divides by the norm of a whole filter, and a smaller filter has another one. So it is
not enough to cut the parameters: they are computed anew of the weight that remains, by the
parametrization's own ``right_inverse``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.models.element_types import tensor_of
from compressor.types.channels import Units

_ROUNDINGS = 16  # by which a computed weight may miss the one that it is to be


def with_originals(
    module: nn.Module, kept: Mapping[str, Mapping[int, Units]], computed: Collection[str]
) -> Mapping[str, Mapping[int, Units]] | None:
    """Add the parameters of which parametrizations compute the weights that become shorter.

    Args:
        kept: the positions that remain, by tensor and axis.
        computed: which of these tensors the module computes.

    Returns:
        ``None`` if a weight is computed in another way, or has a parameter of another form.
    """
    whole = dict(kept)
    for name in sorted(kept.keys() & computed):
        stored = _stored(module, name)
        if stored is None:
            return None
        shape = _weight(module, name).shape
        for original, tensor in stored.items():
            if tensor.ndim != len(shape):
                return None
            axes = {axis: units for axis, units in kept[name].items() if tensor.shape[axis] > 1}
            if any(tensor.shape[axis] != shape[axis] for axis in axes):
                return None
            whole[original] = axes
    return whole


def originals(
    module: nn.Module, graph: ir.Model, weights: Collection[str]
) -> dict[str, Tensor] | None:
    """Return the originals from which parametrizations compute a smaller graph's weights.

    Args:
        weights: names of initializers, of which :func:`with_originals` knows the parameters.

    Returns:
        ``None`` where a parametrization does not say it, as that of orthogonal weights, or fails.
    """
    return _inverted(module, {name: tensor_of(graph.graph.initializers[name]) for name in weights})


def _inverted(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    found: dict[str, Tensor] = {}
    for name in sorted(weights):
        value: Any = weights[name]
        steps = _callables(module, name)
        try:
            with torch.no_grad():
                for step in reversed(steps):
                    value = step.right_inverse(value)
        except Exception:  # noqa: BLE001  # the user's class, with a weight it may not be made for
            return None
        parts = (value,) if isinstance(value, Tensor) else tuple(value)
        names = _stored(module, name) or {}
        found.update((n, part.clone()) for n, part in zip(names, parts, strict=True))
    return found


def of_originals(
    module: nn.Module, changes: Mapping[str, Tensor], computed: Collection[str]
) -> Mapping[str, Tensor]:
    """Put the originals of parametrizations in the place of the weights that they compute.

    A weight with zeros remains: training keeps zeros of parameters, and a parametrization need not.

    Args:
        changes: new values by name.
        computed: which names are of weights that the module computes.

    Returns:
        ``changes`` themselves where something else computes a weight, or a parametrization cannot
        give it, as that of spectral norm gives none of another norm.
    """
    weights = {name: changes[name] for name in changes.keys() & set(computed)}
    if any(_stored(module, name) is None or not tensor.all() for name, tensor in weights.items()):
        return changes
    found = _inverted(module, weights)
    if found is None or not all(_gives(module, n, found, tensor) for n, tensor in weights.items()):
        return changes
    return {name: tensor for name, tensor in changes.items() if name not in weights} | found


def _gives(module: nn.Module, name: str, found: Mapping[str, Tensor], weight: Tensor) -> bool:
    """Whether the originals found give a weight but for roundings."""
    first, *others = _callables(module, name)
    with torch.no_grad():
        value = first(*(found[original] for original in _stored(module, name) or ()))
        for step in others:
            value = step(value)
    reach = _ROUNDINGS * torch.finfo(weight.dtype).eps * weight.abs().max()
    return value.shape == weight.shape and bool(((value - weight).abs() <= reach).all())


def weight_parameter(part: nn.Module) -> Tensor | None:
    """Return a layer's weight, or the parameter of its shape of which it is computed."""
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    if parametrize.is_parametrized(part, "weight"):
        stored = _steps(part, "weight").parameters(recurse=False)
        return next((t for t in stored if t.shape == weight.shape), weight)
    return weight


class _Called(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of PyTorch
    """Notes the operators that are called, such as ``aten.mm.default``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


def computed_by(module: nn.Module, operators: str) -> tuple[str, str] | None:
    """Return the first tensor whose parametrization calls an operator.

    Args:
        operators: a text that names it, such as ``op='aten.linalg_matrix_exp'``.

    Returns:
        The path of the module that has the tensor, and its name there.
    """
    for path, part in module.named_modules():
        steps = getattr(part, "parametrizations", None)
        if not parametrize.is_parametrized(part) or steps is None:
            continue
        for attribute in steps:
            with torch.no_grad(), _Called() as called:
                getattr(part, attribute)
            if any(f"'{name}'" in operators for name in called.names):
                return path, attribute
    return None


def _stored(module: nn.Module, name: str) -> dict[str, Tensor] | None:
    """Return the tensors that a weight is computed of, in their order; ``None`` for others."""
    path, _, attribute = name.rpartition(".")
    part = dict(module.named_modules()).get(path)
    if part is None or not parametrize.is_parametrized(part, attribute):
        return None
    steps = _steps(part, attribute)
    if not all(hasattr(step, "right_inverse") for step in steps):
        return None
    start = f"{path}.parametrizations.{attribute}.".lstrip(".")
    return {start + own: tensor for own, tensor in steps.named_parameters(recurse=False)}


def _steps(part: nn.Module, attribute: str) -> nn.ModuleList:
    steps = part.parametrizations[attribute]  # type: ignore[index]  # a ModuleDict
    assert isinstance(steps, nn.ModuleList)
    return steps


def _callables(module: nn.Module, name: str) -> list[Any]:
    path, _, attribute = name.rpartition(".")
    return list(_steps(module.get_submodule(path), attribute))


def _weight(module: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    weight = getattr(module.get_submodule(path), attribute)
    assert isinstance(weight, Tensor)
    return weight
