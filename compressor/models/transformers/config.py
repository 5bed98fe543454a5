"""The ``config.json`` of a network of ``transformers`` that has become smaller.

A configuration states most sizes once for all layers, so not every smaller network has one. Which
of its numbers are which sizes only the network's own class knows. So numbers are tried until the
class builds tensors of the shapes at hand; on the ``meta`` device that takes no memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from compressor.errors import SpecError
from compressor.models.checkpoint import folder as checkpoint
from compressor.models.torch.saved_module import Alterations
from compressor.models.torch.smaller_module import close, random_batch, run_module
from compressor.models.transformers.networks import (
    CONFIG,
    described_network,
    described_shapes,
    read_config,
)
from compressor.types.tensors import TensorSpec

_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
_Key: TypeAlias = tuple[str | int, ...]
_Values: TypeAlias = Mapping[_Key, int | None]

_NO_SIZE = re.compile(
    r"vocab|position|_ids?$|label|layer|depth|max_|kernel|strid|patch|image|bucket|distance|window"
    r"|version|chunk|length|beam|token|top_k|experts|loss|_factor$"
)
_HEADS = re.compile(r"head|groups")
_HEAD_SIZE = re.compile(r"head_(dim|size)|d_kv")
_OWN_SIZE = re.compile(r"inner|intermediate|ffn|head_dim")
"""What a configuration may leave open, for the class to derive from another size."""
_MOST_BUILT = 64
_MOST_VALUES = 6


def altered_config(
    module: torch.nn.Module,
    directory: Path | None,
    altered: Alterations,
    inputs: Sequence[TensorSpec],
) -> Mapping[str, Any]:
    """Return the content of ``config.json`` for what has become of a module; empty without one.

    Args:
        module: the network as it is now.
        directory: the one of Hugging Face that it came from, if it did.
        altered: what of it is another.
        inputs: the network's.

    Raises:
        SpecError: no configuration describes the network.
    """
    if directory is None or not (directory / CONFIG).is_file():
        return {}
    if not altered.channels_removed:
        return checkpoint.read_config(directory / CONFIG)
    if altered.executes_graph:
        raise _no_config(directory, "it is no longer a network of its class, but executes a graph")
    return smaller_config(module, directory, None if altered.planned else inputs)


def smaller_config(
    network: torch.nn.Module, directory: Path, inputs: Sequence[TensorSpec] | None
) -> dict[str, Any]:
    """Return the content of ``config.json`` for a network that lost channels.

    Args:
        network: an instance of a class of ``transformers`` with smaller tensors.
        directory: where the network came from; holds its ``config.json`` as it was.
        inputs: of the network, which is compared with one of that configuration on a small batch:
            heads may have any size, by their shapes. ``None`` where only the shapes are known.

    Raises:
        SpecError: no configuration describes the network.
    """
    stored = read_config(directory)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    search = _Search(type(network), stored, wanted, _stated(network, stored))
    ends = []
    for values in search.ends():
        ends.append(values)
        content = search.written(values)
        if search.wrong(values):
            continue
        if inputs is None or _same_function(network, content, inputs):
            return content
    nearest = min(ends, key=search.cost)
    if search.wrong(nearest):
        raise _no_config(directory, search.trouble(nearest))
    raise _no_config(directory, "a network of the same shapes computes something else")


def _no_config(directory: Path, problem: str) -> SpecError:
    return SpecError(
        f"{CONFIG} of {str(directory)!r}",
        f"cannot state the sizes of the smaller network: {problem}",
        "let layers of one kind keep the same number (prune-structured with a target ratio, and "
        "round-to a multiple of the number of heads) and keep by rules what the configuration "
        "does not name, or export layout: graph, which needs no configuration",
    )


def _same_function(
    network: torch.nn.Module, values: Mapping[str, Any], inputs: Sequence[TensorSpec]
) -> bool:
    batch = random_batch(inputs)
    found = run_module(described_network(network, values), inputs, batch)
    wanted = run_module(network, inputs, batch)
    return len(found) == len(wanted) and all(map(close, found, wanted))


def _stated(network: torch.nn.Module, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a configuration the sizes of heads, which would follow from others otherwise."""
    whole: Mapping[str, Any] = network.config.to_dict()  # type: ignore[operator, union-attr]
    own = {k: v for k, v in whole.items() if _HEAD_SIZE.search(k) and type(v) is int}
    return {**own, **stored}


@dataclass
class _Search:
    """Tries values of a configuration.

    Attributes:
        network: the class.
        stored: the configuration as it was.
        wanted: the shapes that it should have.
        stated: the configuration with what is left open in it, so that it stays as it is.
        built: the tensors of wrong shapes, by the values that were tried; ``None`` where the class
            does not take them.
    """

    network: type[torch.nn.Module]
    stored: Mapping[str, Any]
    wanted: _Shapes
    stated: Mapping[str, Any]
    built: dict[tuple[tuple[_Key, int | None], ...], _Shapes | None] = field(default_factory=dict)

    def ends(self) -> Iterator[_Values]:
        """Yield the values that give the most tensors their shape, from two starts."""
        before = described_shapes(self.network, self.stored) or {}
        lengths = Counter(
            pair
            for name, shape in before.items()
            for pair in zip(shape, self.wanted.get(name, ()), strict=False)
        )
        choices = {key: _meanings(key, value, lengths) for key, value in _sizes(self.stated, ())}
        choices = {key: values for key, values in choices.items() if len(values) > 1}
        usual = {key: values[0] for key, values in choices.items()}
        as_it_was = {key: value for key, value in _sizes(self.stated, ()) if key in choices}
        for start in (usual, as_it_was):
            yield self._improved(start, choices)

    def _improved(self, start: _Values, choices: Mapping[_Key, Sequence[int | None]]) -> _Values:
        """Change one value at a time for as long as that helps."""
        best = start
        better = True
        while better and self.wrong(best):
            better = False
            for key, values in choices.items():
                for value in values:
                    tried = {**best, key: value}
                    if self.cost(tried) < self.cost(best):
                        best, better = tried, True
        return best

    def cost(self, values: _Values) -> int:
        """Return how many tensors have another shape."""
        return len(self.wrong(values))

    def wrong(self, values: _Values) -> list[str]:
        """Return the tensors whose shape is another; all, where the class takes no such values."""
        found = self._shapes(values)
        if found is None:
            return sorted(self.wanted)
        return sorted(n for n in {**self.wanted, **found} if self.wanted.get(n) != found.get(n))

    def _shapes(self, values: _Values) -> _Shapes | None:
        key = tuple(values.items())
        if key not in self.built:
            if len(self.built) >= _MOST_BUILT:
                return None
            self.built[key] = described_shapes(self.network, self.written(values))
        return self.built[key]

    def written(self, values: _Values) -> dict[str, Any]:
        """Return the configuration with some values."""
        content: dict[str, Any] = _copied(self.stated)
        for (*parents, last), value in values.items():
            place: Any = content
            for parent in parents:
                place = place[parent]
            place[last] = value
        return content

    def trouble(self, values: _Values) -> str:
        """Say what stands against a configuration."""
        name = self.wrong(values)[0]
        own = self.wanted.get(name, ())
        for other, shape in self.wanted.items():
            if shape != own and _numberless(other) == _numberless(name):
                return f"{name!r} is {list(own)} and {other!r} {list(shape)}"
        built = self._shapes(values)
        told = ", ".join(f"{_text(k)}: {v}" for k, v in values.items())
        if built is None:
            return f"{self.network.__name__} does not take {told}"
        found = built.get(name)
        nearest = f", and {list(found)} by the nearest ({told})" if found is not None else ""
        return f"{name!r} is {list(own)}{nearest}"


def _sizes(values: Any, key: _Key) -> Iterator[tuple[_Key, int | None]]:
    """Yield the numbers of a configuration that may be sizes, with the way to each."""
    name = next((str(k) for k in reversed(key) if isinstance(k, str)), "")
    if isinstance(values, Mapping):
        for own, value in values.items():
            yield from _sizes(value, (*key, own))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _sizes(value, (*key, index))
    elif _NO_SIZE.search(name):
        return
    elif (type(values) is int and values > 1) or (values is None and _OWN_SIZE.search(name)):
        yield key, values


def _meanings(
    key: _Key, value: int | None, lengths: Mapping[tuple[int, int], int]
) -> list[int | None]:
    """Return what a number may have become, likelier ones first; what it was is one of them.

    Args:
        key: where it stands.
        value: what it was.
        lengths: lengths before and after, and on how many axes.
    """
    every = sorted(lengths, key=lambda pair: (-lengths[pair], pair))
    often = [pair for pair in every if pair[0] != pair[1]]
    if value is None:
        if not often:
            return [None]
        # What another size no longer gives may be what has stayed as it was.
        own = [after for _, after in often][:_MOST_VALUES]
        same = [after for before, after in every if before == after][:_MOST_VALUES]
        return list(dict.fromkeys([None, *own, *same]))
    whole: list[int | None] = [after for before, after in often if before == value]
    parts: list[int | None] = [
        value * after // before
        for before, after in often
        if before > value and before % value == 0 and value * after % before == 0
    ]
    name = next(str(k) for k in reversed(key) if isinstance(k, str))
    if _HEAD_SIZE.search(name):
        order = [value, *parts, *whole]
    elif _HEADS.search(name):
        order = [*parts, value, *whole]
    else:
        order = [*whole, value, *parts]
    return list(dict.fromkeys(order))[: 2 * _MOST_VALUES]


def _copied(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else values


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _text(key: _Key) -> str:
    return ".".join(map(str, key))
