"""The decoder blocks of a language model, run one at a time from weights that stay in their files.

The network is the class of ``transformers`` with memory-mapped weights. What lies around the blocks
(tables, norms, positions, masks) is run with blocks in place that only note what they are given, so
that each block is then run by itself, as the class would run it, on values from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.errors import ModelError, SpecError
from compressor.models.transformers.block_stages import Given, Stage, caches, follow, stages_of
from compressor.models.transformers.cached_attention import change_cache
from compressor.models.transformers.networks import reason_of, silent

KEYS, VALUES = ".keys", ".values"
"""What the names of the values end in that attention keeps; before it is the attention's path."""

_PROBED = 8  # tokens that are followed through the blocks without any computing
_ROWS = 8192  # of the output layer that are widened at once
_REMEDY = "write a spec with model.factory, which runs the whole model in memory"


@dataclass(frozen=True)
class DecoderBlock:
    """One block: where it is, and its layers."""

    path: str
    stages: tuple[Stage, ...]


class _Reached(Exception):  # nothing is wrong
    """The last block has been reached."""


class Decoder:
    """A causal language model whose blocks are run one at a time, in float32.

    Args:
        network: a class of ``transformers`` with mapped weights.

    Raises:
        SpecError: it has no list of blocks, or they cannot be followed.
    """

    def __init__(self, network: Any):
        self._network = network
        path, modules = _block_list(network)
        self._modules = tuple(modules)
        self._tuples = False
        self._around = _widen(network, path)
        self._changes: Mapping[str, Tensor] = {}
        try:
            with silent():
                self.blocks = self._found(path)
        except SpecError:
            raise
        except Exception as error:  # a class may do anything on the meta device
            raise SpecError(
                "model.checkpoint",
                f"the blocks {path!r} of {type(network).__name__} cannot be followed "
                f"({reason_of(error)})",
                _REMEDY,
            ) from error

    @cached_property
    def attention(self) -> Mapping[str, int]:
        """The paths of all attention whose keys and values can be seen; in which block each is.

        Raises:
            SpecError: a block does something else with its cache.
        """
        tokens = torch.zeros((1, _PROBED), dtype=torch.int64)
        found: dict[str, tuple[str, ...]] = {}
        places = {}
        for index, given in enumerate(self.given(tokens)):
            module, path = self._modules[index], self.blocks[index].path
            form = str(module)
            try:
                names = found[form] = found.get(form) or caches(module, given)
            except Exception as error:  # as above
                raise SpecError(
                    "model.checkpoint",
                    f"the cache of {type(module).__name__} cannot be followed ({reason_of(error)})",
                    "leave out the pass quantize-cache",
                ) from error
            places.update({f"{path}.{name}" if name else path: index for name in names})
        return places

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self._network.get_input_embeddings().num_embeddings)

    @property
    def largest_block(self) -> int:
        """Bytes of the block with most parameters, in float32."""
        return max(4 * sum(p.numel() for p in m.parameters()) for m in self._modules)

    def given(self, tokens: Tensor) -> list[Given]:
        """Return what each block is called with; values that flow are right for the first only.

        Args:
            tokens: ``[batch, sequence]``.
        """
        noted: list[Given] = []
        with torch.inference_mode(), self._noting(noted, len(self._modules)), suppress(_Reached):
            self._network(input_ids=tokens, use_cache=False)
        return noted

    def with_changes(self, values: Mapping[str, Tensor]) -> Decoder:
        """Return one with other parameters around the blocks, by their names in the network.

        They are read when it is first run. A table and an output layer should be mapped.
        """
        other = copy(self)
        other._changes = values
        return other

    def open(self, index: int) -> nn.Module:
        """Return a block in float32, which may be changed; the only one that takes memory."""
        module = self._modules[index]
        wide = {id(p): _wide(p) for p in module.parameters()}
        with torch.inference_mode():
            opened = deepcopy(module, wide)
        for name, parameter in opened.named_parameters():
            if not bool(parameter.sum().isfinite()) and not bool(parameter.isfinite().all()):
                raise ModelError(
                    f"tensor {f'{self.blocks[index].path}.{name}'!r}",
                    "holds values that are NaN or infinite",
                    "the training diverged or the file is damaged; use an earlier checkpoint",
                )
        return opened

    def weightless(self, index: int) -> Alone:
        """Return a block as a module of one input, all of its weights zero, which take no memory.

        It is what the block's graph is found on.
        """
        module = self._modules[index]
        tokens = torch.zeros((1, _PROBED), dtype=torch.int64)
        empty = {id(p): _empty(p) for p in module.parameters()}
        return Alone(deepcopy(module, empty), self.given(tokens)[index])

    def replace(self, module: nn.Module, index: int, values: Mapping[str, Tensor]) -> None:
        """Set parameters of an open block, given by their names in the network."""
        for name, value in values.items():
            inside = name.removeprefix(f"{self.blocks[index].path}.")
            place, _, parameter = inside.rpartition(".")
            setattr(module.get_submodule(place), parameter, _wide(value))

    def logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the network's output for what has flowed out of the last block."""
        count = len(self._modules)
        with torch.inference_mode(), self._noting([], count, hidden):
            out: Tensor = self._network(input_ids=tokens, use_cache=False).logits
        return out

    def run(self, module: nn.Module, hidden: Tensor, given: Given) -> Tensor:
        """Return what flows out of a block."""
        with torch.inference_mode():
            done = module(hidden, *given.args, **given.kwargs)
        out: Tensor = done if isinstance(done, Tensor) else done[0]
        return out

    @contextmanager
    def _noting(self, noted: list[Given], count: int, last: Tensor | None = None) -> Iterator[None]:
        """Let blocks note what they are given; the last one ends it, or gives ``last``."""

        def note(hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
            hidden = kwargs.pop("hidden_states") if hidden is None else hidden
            noted.append(Given(hidden, args, kwargs))
            if len(noted) == count and last is None:
                raise _Reached
            hidden = last if last is not None and len(noted) == count else hidden
            return (hidden,) if self._tuples else hidden

        for module in self._modules:
            module.forward = note  # its attributes stay the block's
        try:
            with self._around.changed(self._changes):
                yield
        finally:
            for module in self._modules:
                del module.forward

    def _found(self, path: str) -> tuple[DecoderBlock, ...]:
        tokens = torch.zeros((1, _PROBED), dtype=torch.int64)
        first: list[Given] = []
        with torch.inference_mode(), self._noting(first, 1), suppress(_Reached):
            self._network(input_ids=tokens, use_cache=False)
        self._tuples = follow(self._modules[0], first[0]).tuples
        followed: dict[str, list[list[tuple[str, int]]]] = {}
        blocks = []
        for index, (module, given) in enumerate(
            zip(self._modules, self.given(tokens), strict=True)
        ):
            form = str(module)
            if form not in followed:
                followed[form] = follow(module, given).stages()
            here = f"{path}.{index}"
            blocks.append(DecoderBlock(here, tuple(stages_of(here, followed[form]))))
        return tuple(blocks)


class Alone(nn.Module):
    """A block with everything it is given besides the values that flow through it.

    Attributes:
        block: the block itself.
    """

    def __init__(self, block: nn.Module, given: Given):
        super().__init__()
        self.block = block
        self._given = given

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values that it is given for."""
        return tuple(self._given.hidden.shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what flows out."""
        done = self.block(hidden, *self._given.args, **self._given.kwargs)
        out: Tensor = done if isinstance(done, Tensor) else done[0]
        return out


def _empty(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)


def _block_list(network: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks of one class that has most parameters.

    Raises:
        SpecError: there is none.
    """
    found: dict[str, nn.ModuleList] = {}
    for path, module in network.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not isinstance(module, nn.ModuleList) or not len(module) or inside:
            continue
        linear = any(isinstance(m, nn.Linear) for m in module.modules())
        if linear and len({type(item) for item in module}) == 1:
            found[path] = module
    if not found:
        parts = ", ".join(f"{n} ({type(m).__name__})" for n, m in network.named_children())
        raise SpecError(
            "model.checkpoint",
            f"{type(network).__name__} has no list of blocks of one class; its modules are {parts}",
            _REMEDY,
        )
    return max(found.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _wide(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(torch.float32), requires_grad=False)


@dataclass
class _Around:
    """What lies around the blocks; the table and the output layer stay in their files.

    Attributes:
        table: rows of the tokens, in their own type.
        output: the weight of the output layer; ``None`` where there is none.
    """

    network: Any
    table: Tensor
    output: Tensor | None
    names: Mapping[str, str]  # `table` or `output`, by the names of the parameters

    @contextmanager
    def changed(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Let other parameters be in place for a while; the last of two names of one is it."""
        before = {name: self._swap(name, value) for name, value in values.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                self._swap(name, value)

    def _swap(self, name: str, value: Tensor) -> Tensor:
        place, _, parameter = name.rpartition(".")
        kinds = self.names.get(name, "").split()
        if not kinds:
            module = self.network.get_submodule(place)
            old: Tensor = getattr(module, parameter)
            setattr(module, parameter, _wide(value))
            return old
        old = getattr(self, kinds[0])
        for kind in kinds:
            setattr(self, kind, value)
        return old

    def look_up(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Widen the rows of the tokens at hand alone, before the table is read."""
        seen, places = torch.unique(args[0], return_inverse=True)
        module.weight = nn.Parameter(self.table[seen].to(torch.float32), requires_grad=False)
        return (places, *args[1:])

    def multiply(self, bias: Tensor | None, values: Tensor) -> Tensor:
        """Return the output layer's product."""
        assert self.output is not None
        return _multiply(self.output, bias, values)


def _widen(network: Any, blocks: str) -> _Around:
    """Let what lies around the blocks compute in float32, and return it."""
    table, output = network.get_input_embeddings(), network.get_output_embeddings()
    names: dict[str, str] = {}
    for path, module in network.named_modules():
        if module is table or module is output:
            kind = "table" if module is table else "output"
            names[f"{path}.weight"] = kind
        if path.startswith(f"{blocks}.") or module in (table, output):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _wide(parameter))
    tied = output is not None and output.weight is table.weight
    if tied:
        names = dict.fromkeys(names, "table output")
    rows = table.weight.detach()
    around = _Around(network, rows, None if output is None else output.weight.detach(), names)
    if output is not None:
        output.forward = partial(around.multiply, output.bias)
    table.padding_idx = None  # a place in the whole table, and for gradients only
    table.register_forward_pre_hook(around.look_up)
    return around


def _multiply(weight: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
    """Multiply with the output layer, of which a part is widened at a time."""
    whole = values.new_empty((*values.shape[:-1], len(weight)))
    for start in range(0, len(weight), _ROWS):
        rows = weight[start : start + _ROWS].to(torch.float32)
        whole[..., start : start + _ROWS] = functional.linear(values, rows)
    return whole if bias is None else whole.add_(bias.to(torch.float32))


Observe = Callable[[str, Tensor], None]


@contextmanager
def observing(
    module: nn.Module, path: str, stage: Stage, attention: Iterable[str], observe: Observe
) -> Iterator[None]:
    """Let each value that the layers of a stage read be seen once as the block runs.

    Args:
        path: where the module is in the network.
        attention: paths of attention whose keys and values are seen, too.
        observe: called with the value's name.
    """
    ends: list[Callable[[], None]] = []
    seen: set[str] = set()
    for layer in stage.layers:
        name = stage.inputs[layer]
        if name in seen:
            continue
        seen.add(name)

        def look(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            observe(name, args[0])

        part = module.get_submodule(layer.removeprefix(f"{path}."))
        ends.append(part.register_forward_pre_hook(look).remove)
    for name in attention:

        def both(keys: Tensor, values: Tensor, name: str = name) -> tuple[Tensor, Tensor]:
            observe(f"{name}{KEYS}", keys)
            observe(f"{name}{VALUES}", values)
            return keys, values

        ends.append(change_cache(module.get_submodule(name.removeprefix(f"{path}.")), both))
    try:
        yield
    finally:
        for end in ends:
            end()
