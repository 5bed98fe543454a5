"""The ``config.json`` of a ``transformers`` network that lost channels.

A configuration states most sizes once for all layers, so not every smaller network has one. Only
the network's class knows which of its numbers are which sizes. So numbers are tried until the class
builds tensors of the right shapes, which takes no memory on the ``meta`` device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from compressor.errors import SpecError
from compressor.models.checkpoint import folder as checkpoint
from compressor.models.torch.saved_module import Alterations
from compressor.models.torch.smaller_module import close, random_batch, run_module
from compressor.models.transformers.networks import (
    CONFIG,
    described_module,
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
"""Sizes that a configuration may omit, so that the class derives them from others."""
_EXECUTES = (
    "it is no longer a network of its class, but executes a graph (the pass's notes say why)"
)
OR_GRAPH = ", or export layout: graph, which needs no configuration"
_MOST_BUILT = 64
_MOST_VALUES = 6


def altered_config(
    module: torch.nn.Module,
    directory: Path | None,
    altered: Alterations,
    inputs: Sequence[TensorSpec],
) -> Mapping[str, Any]:
    """Return the content of ``config.json`` for a changed module; empty without one.

    Raises:
        SpecError: no configuration describes the network.
    """
    if directory is None or not (directory / CONFIG).is_file():
        return {}
    if not altered.channels_removed:
        return checkpoint.read_config(directory / CONFIG)
    if altered.executes_graph:
        raise _no_config(directory, _EXECUTES)
    return smaller_config(module, directory, None if altered.planned else inputs)


def smaller_config(
    network: torch.nn.Module, directory: Path, inputs: Sequence[TensorSpec] | None
) -> dict[str, Any]:
    """Return the content of ``config.json`` for a network that lost channels.

    Args:
        network: an instance of a class of ``transformers`` with smaller tensors.
        directory: where the network came from; holds its original ``config.json``.
        inputs: the network's inputs, to compare it with a network of that configuration on a small
            batch, since shapes do not determine the size of heads. ``None`` if only the shapes are
            known.

    Raises:
        SpecError: no configuration describes the network.
    """
    stored = read_config(directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    search = _Search(type(network), stored, shapes, _stated(network, stored))
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
        raise _no_config(directory, search.trouble(nearest), search.around_wrong(nearest))
    other, modules = _differences(network, search.written(nearest))
    raise _no_config(
        directory, f"a network of the same shapes computes something else{other}", modules
    )


def _no_config(directory: Path, problem: str, modules: Iterable[str] = ()) -> SpecError:
    """Return the error.

    Args:
        modules: paths of those that do not fit.
    """
    named = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) + ".*": None for path in modules if path}
    matches = [m for m in named if not any(fnmatchcase(m, o) for o in named if o != m)]
    rules = ", ".join(f"{{match: '{match}', skip: true}}" for match in matches)
    layers = f" (layers: [{rules}])" if rules else ""
    remedy = (
        "name layout: compressed-tensors in the spec that prunes, with a target of ratio, macs or "
        "parameters, so that only what a configuration can state goes; or keep by rules what it "
        f"does not name{layers}{OR_GRAPH}"
    )
    return SpecError(
        f"{CONFIG} of {str(directory)!r}",
        f"cannot state the sizes of the smaller network: {problem}",
        remedy,
    )


def _differences(network: torch.nn.Module, values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return what numbers modules hold that a configuration gives another value, and which do.

    Classes derive such from sizes: the factor of attention from that of heads, and in some that of
    the table of tokens from that of the stream.
    """
    described = described_module(type(network), values)
    others = {} if described is None else dict(described.named_modules())
    found = {
        path: [
            (name, value, vars(others[path]).get(name))
            for name, value in vars(part).items()
            if type(value) in (int, float) and vars(others[path]).get(name, value) != value
        ]
        for path, part in network.named_modules()
        if path in others
    }
    found = {path: numbers for path, numbers in found.items() if numbers}
    if not found:
        return "", []
    path, numbers = next(iter(found.items()))
    name, value, other = min(numbers, key=lambda number: type(number[1]) is int)
    return f" ({name} of {path!r} is {value:.4g}, and {other:.4g} by these sizes)", list(found)


def _same_function(
    network: torch.nn.Module, values: Mapping[str, Any], inputs: Sequence[TensorSpec]
) -> bool:
    batch = random_batch(inputs)
    try:
        described = run_module(described_network(network, values), inputs, batch)
    except Exception:  # noqa: BLE001  # sizes that do not go together may build, and not run
        return False
    actual = run_module(network, inputs, batch)
    return len(described) == len(actual) and all(map(close, described, actual))


def _stated(network: torch.nn.Module, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sizes of heads to a configuration, which would otherwise follow from other sizes."""
    whole: Mapping[str, Any] = network.config.to_dict()  # type: ignore[operator, union-attr]
    head_sizes = {k: v for k, v in whole.items() if _HEAD_SIZE.search(k) and type(v) is int}
    return {**head_sizes, **stored}


@dataclass
class _Search:
    """Searches the values of a configuration.

    Attributes:
        stated: the configuration with the sizes that it omits.
        built: the shapes by the values that were tried; ``None`` where the class rejects them.
    """

    network: type[torch.nn.Module]
    stored: Mapping[str, Any]
    target: _Shapes
    stated: Mapping[str, Any]
    built: dict[tuple[tuple[_Key, int | None], ...], _Shapes | None] = field(default_factory=dict)

    @cached_property
    def before(self) -> _Shapes:
        """The shapes of the configuration as it was."""
        return described_shapes(self.network, self.stored) or {}

    def ends(self) -> Iterator[_Values]:
        """Yield the best values found from each of two starts."""
        lengths = Counter(
            pair
            for name, shape in self.before.items()
            for pair in zip(shape, self.target.get(name, ()), strict=False)
        )
        choices = {key: _meanings(key, value, lengths) for key, value in _sizes(self.stated, ())}
        choices = {key: values for key, values in choices.items() if len(values) > 1}
        usual = {key: values[0] for key, values in choices.items()}
        as_it_was = {key: value for key, value in _sizes(self.stated, ()) if key in choices}
        for start in (usual, as_it_was):
            yield self._improved(start, choices)

    def _improved(self, start: _Values, choices: Mapping[_Key, Sequence[int | None]]) -> _Values:
        """Change one value at a time as long as that helps."""
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
        return len(self.wrong(values))

    def wrong(self, values: _Values) -> list[str]:
        """Return the tensors with a wrong shape: all of them if the class rejects the values."""
        shapes = self._shapes(values)
        if shapes is None:
            return sorted(self.target)
        return sorted(n for n in {**self.target, **shapes} if self.target.get(n) != shapes.get(n))

    def _shapes(self, values: _Values) -> _Shapes | None:
        key = tuple(values.items())
        if key not in self.built:
            if len(self.built) >= _MOST_BUILT:
                return None
            self.built[key] = described_shapes(self.network, self.written(values))
        return self.built[key]

    def written(self, values: _Values) -> dict[str, Any]:
        content = deepcopy(dict(self.stated))
        for (*parents, last), value in values.items():
            place: Any = content
            for parent in parents:
                place = place[parent]
            place[last] = value
        return content

    def around_wrong(self, values: _Values) -> list[str]:
        """Return the modules that hold the layers with a wrong shape; those that lost outputs."""
        wrong = [name for name in self.wrong(values) if len(self.target.get(name, ())) > 1]
        lost = [n for n in wrong if self.target[n][0] < self.before.get(n, (0,))[0]]
        layers = [name.rpartition(".")[0] for name in lost or wrong]
        return list(dict.fromkeys(layer.rpartition(".")[0] or layer for layer in layers))

    def trouble(self, values: _Values) -> str:
        """Return why a configuration does not describe the network."""
        name = self.wrong(values)[0]
        actual = self.target.get(name, ())
        for other, shape in self.target.items():
            if shape != actual and _numberless(other) == _numberless(name):
                return f"{name!r} is {list(actual)} and {other!r} {list(shape)}"
        built = self._shapes(values)
        tried = ", ".join(f"{'.'.join(map(str, key))}: {value}" for key, value in values.items())
        if built is None:
            return f"{self.network.__name__} does not take {tried}"
        shape_built = built.get(name)
        if shape_built is None:
            return f"{name!r} is {list(actual)}"
        return f"{name!r} is {list(actual)}, and {list(shape_built)} by the nearest ({tried})"


def _sizes(values: Any, key: _Key) -> Iterator[tuple[_Key, int | None]]:
    """Yield the numbers of a configuration that may be sizes, with the path to each."""
    name = next((str(k) for k in reversed(key) if isinstance(k, str)), "")
    if isinstance(values, Mapping):
        for entry, value in values.items():
            yield from _sizes(value, (*key, entry))
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
    """Return the candidates for a number, the old one included, likelier ones first.

    Args:
        lengths: pairs of old and new lengths, with the number of axes that have them.
    """
    every = sorted(lengths, key=lambda pair: (-lengths[pair], pair))
    often = [pair for pair in every if pair[0] != pair[1]]
    if value is None:
        if not often:
            return [None]
        # What another size no longer gives may be what has stayed as it was.
        changed = [after for _, after in often][:_MOST_VALUES]
        same = [after for before, after in every if before == after][:_MOST_VALUES]
        return list(dict.fromkeys([None, *changed, *same]))
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


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)
