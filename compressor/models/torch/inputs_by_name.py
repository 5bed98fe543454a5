"""How a module's forward takes its inputs: by name, by position, or by ``*`` or ``**``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from compressor.errors import SpecError


def bound(
    module: nn.Module, example: dict[str, Tensor], dynamic: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any] | None, Any]:
    """Return arguments: by name if ``forward`` has parameters of these names, else by position."""
    parameters = inspect.signature(module.forward).parameters
    if all(name in parameters for name in example):
        return (), dict(example), dict(dynamic)
    accepted = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(example) > len(accepted) and not variadic:
        raise SpecError(
            "model.inputs",
            f"names {len(example)} inputs, but forward of {type(module).__name__} takes "
            f"{len(accepted)}",
            f"its parameters are {', '.join(parameters) or 'none'}",
        )
    axes, count = tuple(dynamic.values()), len(accepted)
    others = (axes[count:],) if count < len(axes) else ()  # what ``*`` takes is one parameter
    return tuple(example.values()), None, (*axes[:count], *others)


def takes_names(module: nn.Module, names: Collection[str]) -> bool:
    """Return whether forward takes inputs by name, by ``**`` if need be; then all must have one."""
    parameters = inspect.signature(module.forward).parameters
    if parameters.keys() >= set(names):
        return True
    kinds = {p.kind: p.name for p in parameters.values() if p.name not in names}
    return kinds.keys() == {inspect.Parameter.VAR_KEYWORD}


@contextmanager
def named_parameters(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Give a forward with ``**`` a parameter for each input; PyTorch's exporter needs them.

    It cannot let an axis open of what ``**`` takes.
    """
    forward = module.forward
    if inspect.signature(forward).parameters.keys() >= set(names) or not takes_names(module, names):
        yield
        return

    named = partial(forward)
    kind, own = inspect.Parameter.KEYWORD_ONLY, vars(module).get("forward")
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    vars(named)["__signature__"] = signature
    vars(module)["forward"] = named
    try:
        yield
    finally:
        vars(module).pop("forward")
        if own is not None:
            vars(module)["forward"] = own
