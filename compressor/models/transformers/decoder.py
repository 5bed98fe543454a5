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
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import SpecError, not_finite
from compressor.models.checkpoint.dequantized import mapped_floats
from compressor.models.transformers.around_blocks import widen
from compressor.models.transformers.block_stages import (
    BlockArguments,
    Stage,
    StandaloneBlock,
    caches,
    stages_of,
    standalone,
    trace,
)
from compressor.models.transformers.cached_attention import change_cache
from compressor.models.transformers.classes import silent
from compressor.models.transformers.networks import reason_of

KEYS, VALUES = ".keys", ".values"
"""What the names of the values end in that attention keeps; before it is the attention's path."""

_UNKNOWN = object()  # what a block returns after its hidden values, such as attention's weights

_PROBED = 8  # tokens that are traced through the blocks without any computing
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
        SpecError: it has no list of blocks, or they cannot be traced.
    """

    def __init__(self, network: Any):
        self._network = network
        path, modules = block_list(network)
        self._modules = tuple(modules)
        self._values = 0
        self._around = widen(network, path)
        self._changes: Mapping[str, Tensor] = {}
        self._untied = False
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
        for index, given in enumerate(self.arguments(tokens)):
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

    def arguments(self, tokens: Tensor) -> list[BlockArguments]:
        """Return the arguments of each block; their hidden values are right for the first only.

        Args:
            tokens: ``[batch, sequence]``.
        """
        noted: list[BlockArguments] = []
        with torch.inference_mode(), self._noting(noted, len(self._modules)), suppress(_Reached):
            self._network(input_ids=tokens, use_cache=False)
        return noted

    def with_changes(self, values: Mapping[str, Tensor], *, untied: bool = False) -> Decoder:
        """Return one with other parameters around the blocks, by their names in the network.

        They are read when it is first run. A table and an output layer should be mapped.

        Args:
            untied: the output layer has a weight of its own, though its class ties the two.
        """
        other = copy(self)
        other._changes, other._untied = values, untied
        return other

    def open(self, index: int, folder: Path | None = None) -> nn.Module:
        """Return a block in float32, which may be changed; its matrices lie in mapped files.

        Args:
            folder: where these files are made; they have no names.

        Raises:
            ModelError: a weight is not finite.
            InputError: the disk is full.
        """
        module = self._modules[index]
        floats = {id(p): _mapped(p, folder) for p in module.parameters()}
        with torch.inference_mode():
            opened = deepcopy(module, floats)
        for name, parameter in opened.named_parameters():
            if not bool(parameter.sum().isfinite()) and not bool(parameter.isfinite().all()):
                raise not_finite(f"tensor {f'{self.blocks[index].path}.{name}'!r}")
        return opened

    def weightless(self, index: int) -> StandaloneBlock:
        """Return a block as a module of one input, all of its weights zero, which take no memory.

        It is what the block's graph is found on.
        """
        tokens = torch.zeros((1, _PROBED), dtype=torch.int64)
        return standalone(self._modules[index], self.arguments(tokens)[index])

    def replace(
        self,
        module: nn.Module,
        index: int,
        values: Mapping[str, Tensor],
        folder: Path | None = None,
    ) -> None:
        """Set parameters of an open block, given by their names in the network.

        Args:
            folder: as above.

        Raises:
            SpecError: the class makes other parameters of one when it loads.
        """
        own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, value in values.items():
            inside = name.removeprefix(f"{self.blocks[index].path}.")
            place, _, parameter = inside.rpartition(".")
            if inside not in own:
                raise SpecError(
                    f"tensor {name!r}",
                    f"is not a parameter of {type(self._modules[index]).__name__}, which makes "
                    "others of it, so that its new values cannot be computed with",
                    f"keep it float: skip or match {place!r} in the pass, or {_REMEDY}",
                )
            setattr(module.get_submodule(place), parameter, _mapped(value, folder))

    def logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the network's output for what has flowed out of the last block."""
        with torch.inference_mode():
            return self.differentiable_logits(tokens, hidden)

    def differentiable_logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the same, through which gradients for ``hidden`` can be found."""
        with self._noting([], len(self._modules), hidden):
            out: Tensor = self._network(input_ids=tokens, use_cache=False).logits
        return out

    def run(self, module: nn.Module, hidden: Tensor, given: BlockArguments) -> Tensor:
        """Return what flows out of a block."""
        with torch.inference_mode():
            return given.call(module, hidden)

    @contextmanager
    def _noting(
        self, noted: list[BlockArguments], count: int, last: Tensor | None = None
    ) -> Iterator[None]:
        """Make blocks record their arguments; the last one ends the run, or returns ``last``."""

        def note(hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
            hidden = kwargs.pop("hidden_states") if hidden is None else hidden
            if any(value is _UNKNOWN for value in (*args, *kwargs.values())):
                raise ValueError("a block takes more of the one before than its hidden values")
            noted.append(BlockArguments(hidden, args, kwargs))
            if len(noted) == count and last is None:
                raise _Reached
            hidden = last if last is not None and len(noted) == count else hidden
            return (hidden, *[_UNKNOWN] * (self._values - 1)) if self._values else hidden

        for module in self._modules:
            module.forward = note  # its attributes stay the block's
        try:
            with self._around.changed(self._changes, untied=self._untied):
                yield
        finally:
            for module in self._modules:
                del module.forward

    def _found(self, path: str) -> tuple[DecoderBlock, ...]:
        tokens = torch.zeros((1, _PROBED), dtype=torch.int64)
        first: list[BlockArguments] = []
        with torch.inference_mode(), self._noting(first, 1), suppress(_Reached):
            self._network(input_ids=tokens, use_cache=False)
        self._values = trace(self._modules[0], first[0]).values
        traced: dict[str, list[list[tuple[str, int]]]] = {}
        blocks = []
        for index, (module, given) in enumerate(
            zip(self._modules, self.arguments(tokens), strict=True)
        ):
            form = str(module)
            if form not in traced:
                traced[form] = trace(module, given).stages()
            here = f"{path}.{index}"
            blocks.append(DecoderBlock(here, tuple(stages_of(here, traced[form]))))
        return tuple(blocks)


def block_list(network: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks of one class that has most parameters.

    Raises:
        SpecError: there is none, or its layers are not ``nn.Linear``.
    """
    found: dict[str, nn.ModuleList] = {}
    others: dict[str, nn.ModuleList] = {}
    for path, module in network.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in (*found, *others))
        if not isinstance(module, nn.ModuleList) or not len(module) or inside:
            continue
        if len({type(item) for item in module}) == 1:
            linear = any(isinstance(m, nn.Linear) for m in module.modules())
            (found if linear else others)[path] = module
    if not found and others:
        path, blocks = next(iter(others.items()))
        holders = (m for m in blocks.modules() if any(p.dim() == 2 for p in m.parameters(False)))
        kinds = ", ".join(sorted({type(m).__name__ for m in holders})) or "no matrices"
        raise SpecError(
            "model.checkpoint",
            f"the blocks of {type(network).__name__} ({path}) hold no nn.Linear, but {kinds}",
            _REMEDY,
        )
    if not found:
        parts = ", ".join(f"{n} ({type(m).__name__})" for n, m in network.named_children())
        raise SpecError(
            "model.checkpoint",
            f"{type(network).__name__} has no list of blocks of one class; its modules are {parts}",
            _REMEDY,
        )
    return max(found.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _mapped(parameter: Tensor, folder: Path | None) -> nn.Parameter:
    return nn.Parameter(mapped_floats(parameter.detach(), folder), requires_grad=False)


Observe = Callable[[str, Tensor], None]


@contextmanager
def observing(
    module: nn.Module, path: str, stage: Stage, attention: Iterable[str], observe: Observe
) -> Iterator[None]:
    """Show each value that the layers of a stage read, once, as the block runs.

    Args:
        path: where the module is in the network.
        attention: paths of attention whose keys and values ``[batch, tokens, heads x channels]``
            are seen, too.
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
            for end, kept in ((KEYS, keys), (VALUES, values)):
                observe(f"{name}{end}", kept.transpose(1, 2).flatten(2))
            return keys, values

        ends.append(change_cache(module.get_submodule(name.removeprefix(f"{path}.")), both))
    try:
        yield
    finally:
        for end in ends:
            end()
