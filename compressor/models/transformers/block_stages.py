"""What happens in a block: its layers in stages, found without computing anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from compressor.models.transformers.cached_attention import change_cache, keeps_cache


@dataclass(frozen=True)
class BlockArguments:
    """What a block is called with.

    Attributes:
        hidden: the values that flow through the network, as the first block gets them.
        args: further positional arguments.
        kwargs: arguments by name.
    """

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(
        self, block: nn.Module, hidden: Tensor, parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return what flows out of a block, perhaps with some other parameters in it."""
        args, kwargs = (hidden, *self.args), dict(self.kwargs)
        if parameters is None:
            result = block(*args, **kwargs)
        else:
            result = functional_call(block, dict(parameters), args, kwargs)
        out: Tensor = result if isinstance(result, Tensor) else result[0]
        return out


def differentiable(arguments: Sequence[BlockArguments]) -> list[BlockArguments]:
    """Return copies through which gradients can be found; what was one tensor still is."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        return copies.setdefault(id(value), value.clone()) if isinstance(value, Tensor) else value

    parts = ((each.hidden, each.args, dict(each.kwargs)) for each in arguments)
    return [BlockArguments(*tree_map(copied, part)) for part in parts]


@dataclass(frozen=True)
class Stage:
    """Linear layers of a block up to a place where a single value flows on.

    Attributes:
        layers: paths of the layers in the order of execution.
        inputs: the name of the value that each of them reads, by path.
    """

    layers: tuple[str, ...]
    inputs: Mapping[str, str]


def stages_of(path: str, found: Sequence[Sequence[tuple[str, int]]]) -> Iterator[Stage]:
    """Yield the stages of a block.

    Args:
        path: where the block is in the network.
        found: what :meth:`OperatorTrace.stages` returns.
    """
    for layers in found:
        names: dict[int, str] = {}
        for name, value in layers:
            names.setdefault(value, f"{path}.{name}.input")
        paths = tuple(dict.fromkeys(f"{path}.{name}" for name, _ in layers))
        yield Stage(paths, {f"{path}.{name}": names[value] for name, value in layers})


class StandaloneBlock(nn.Module):
    """A block with all arguments besides the values that flow through it.

    Attributes:
        block: the block itself.
    """

    def __init__(self, block: nn.Module, arguments: BlockArguments):
        super().__init__()
        self.block = block
        self._arguments = arguments

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values that it is called with."""
        return tuple(self._arguments.hidden.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what flows out."""
        return self._arguments.call(self.block, hidden)


def standalone(module: nn.Module, arguments: BlockArguments) -> StandaloneBlock:
    """Return a block by itself, all of its weights zero, which take no memory."""
    empty = {id(p): _empty(p) for p in module.parameters()}
    return StandaloneBlock(deepcopy(module, empty), arguments)


def _empty(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)


class OperatorTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so are its methods
    """Every operator of a block, and where its linear layers are among them."""

    def __init__(self, hidden: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = 0  # in the tuple that the block returns; none if it returns a tensor
        self.hidden = hidden
        self._operators: list[tuple[list[Tensor], list[Tensor]]] = []
        self._layers: list[tuple[str, Tensor, int]] = []  # name, input, its last operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Held, so that no other tensor takes the place of one in memory.
        self._operators.append((_tensors((args, kwargs)), _tensors(out)))
        return out

    def after(self, name: str, _: nn.Module, args: tuple[Any, ...], __: Any) -> None:
        """Note that a linear layer has been computed."""
        self._layers.append((name, args[0], len(self._operators) - 1))

    def stages(self) -> list[list[tuple[str, int]]]:
        """Return the layers by stages: their names, and what tells apart the values they read.

        A stage ends where one value alone is still needed of what depends on the block's input.
        """
        uses = [[id(t) for t in inputs] for inputs, _ in self._operators]
        last = {key: index for index, keys in enumerate(uses) for key in keys}
        carried = {id(self.hidden)}
        live = {key for key in carried if key in last}
        ends = {index for _, _, index in self._layers}
        stages: list[list[tuple[str, int]]] = [[]]
        waiting = iter([*self._layers, None])
        layer = next(waiting)
        for index, (_, outputs) in enumerate(self._operators):
            if not carried.isdisjoint(uses[index]):
                carried.update(id(t) for t in outputs)
                live.update(id(t) for t in outputs)
            live = {key for key in live if last.get(key, -1) > index}
            while index in ends and layer is not None and layer[2] == index:
                stages[-1].append((layer[0], id(layer[1])))
                layer = next(waiting)
            if len(live) == 1 and stages[-1] and layer is not None:
                stages.append([])
        return [stage for stage in stages if stage]


def trace(module: nn.Module, arguments: BlockArguments) -> OperatorTrace:
    """Run a block on the ``meta`` device, where nothing is computed, and note its operators."""
    copy = _weightless(module)
    traced = OperatorTrace(torch.empty_like(arguments.hidden, device="meta", dtype=torch.float32))
    for name, part in copy.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(partial(traced.after, name))
    with traced:
        done = _run_on_meta(copy, arguments, traced.hidden)
    traced.values = 0 if isinstance(done, Tensor) else len(done)
    return traced


def caches(module: nn.Module, arguments: BlockArguments) -> tuple[str, ...]:
    """Return the paths of the attention in a block whose keys and values can be seen."""
    copy, found = _weightless(module), list[str]()

    def seen(name: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found.append(name)
        return keys, values

    for name, part in copy.named_modules():
        if keeps_cache(part):
            change_cache(part, partial(seen, name))
    _run_on_meta(
        copy, arguments, torch.empty_like(arguments.hidden, device="meta", dtype=torch.float32)
    )
    return tuple(dict.fromkeys(found))


def _weightless(module: nn.Module) -> nn.Module:
    """Return a copy of a block on the ``meta`` device."""
    tensors = [*module.parameters(), *module.buffers()]
    return deepcopy(module, {id(t): _on_meta(t) for t in tensors})


def _run_on_meta(module: nn.Module, arguments: BlockArguments, hidden: Tensor) -> Any:
    args, kwargs = tree_map(_on_meta, (arguments.args, dict(arguments.kwargs)))
    with torch.no_grad():
        return module(hidden, *args, **kwargs)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    wide = torch.float32 if value.is_floating_point() else value.dtype
    copy = torch.empty_like(value, device="meta", dtype=wide)
    return nn.Parameter(copy, requires_grad=False) if isinstance(value, nn.Parameter) else copy


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
