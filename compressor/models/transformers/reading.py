"""What a class of ``transformers`` makes of a checkpoint's tensors when they are stored as codes.

``transformers`` replaces linear layers and tables by such that hold codes. Everything else keeps
the parameters that its class has: a router that is not a linear layer, or experts in one tensor of
three axes. What is stored as codes in their place is not read, and their values would be random.
So the class is built on the ``meta`` device, and each tensor's name followed to its module as the
library itself does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.checkpoint.folder import is_llama_like
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.classes import library, silent
from compressor.models.transformers.networks import float_network, meta_copy, reason_of
from compressor.types.carrier import Carrier

_WEIGHT = "weight"
_CODES = ("_packed", "_scale", "_shape", "_zero_point", "_global_scale")
"""What a weight's name ends in where its codes and what belongs to them are stored."""

_STACK = "MergeModulelist"  # the library's operation that stacks single experts
_DEQUANTIZE = "CompressedTensorsDequantize"


@dataclass(frozen=True, eq=False)
class Reading:
    """How a class reads the tensors of a checkpoint.

    Attributes:
        network: the class as it is prepared for codes, on the ``meta`` device.
        places: the parameter that each tensor becomes, or a part of, by the tensor's name.
        merged: tensors that are stacked with others: the weights of single experts.
        changed: other tensors that are not loaded as they are.
        joined: those of them that become parts of a parameter behind the reader of packed codes,
            which leaves floats out.
    """

    network: Any
    places: Mapping[str, str]
    merged: frozenset[str]
    changed: frozenset[str]
    joined: frozenset[str]

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return type(self.network).__name__

    def obstacle(self, name: str, *, is_table: bool = False) -> str:
        """Return why ``transformers`` would not read codes of a weight; empty where it does.

        Args:
            is_table: it is meant as the weight of a table.
        """
        if name in self.merged:
            return ""
        place = self.places.get(name)
        if place is None:
            return f"{self.class_name} has no tensor of this name"
        module, _, parameter = place.rpartition(".")
        kind = type(self.network.get_submodule(module))
        if parameter != _WEIGHT or not issubclass(kind, torch.nn.Linear | torch.nn.Embedding):
            return f"it is a parameter of {kind.__name__}, which is not a linear layer"
        if issubclass(kind, torch.nn.Embedding) and not is_table:
            return "a table is looked up, not multiplied"
        if name in self.changed:
            return f"{self.class_name} does not load it as it is stored"
        if place in self._shared and issubclass(kind, torch.nn.Linear):
            return f"{self.class_name} shares it with another layer"
        return ""

    def owner(self, name: str) -> str:
        """Return the class of the module that a tensor belongs to, if that is none of PyTorch's."""
        place = self.places.get(name)
        if place is None:
            return ""
        kind = type(self.network.get_submodule(place.rpartition(".")[0]))
        usual = (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
        return "" if issubclass(kind, usual) else kind.__name__

    def module(self, name: str) -> str:
        """Return the module that a weight becomes a part of, or its own path if there is none."""
        place = name if name in self.merged else self.places.get(name, name)
        return place.removesuffix(f".{_WEIGHT}")

    @cached_property
    def linear(self) -> tuple[str, ...]:
        """Paths of all linear layers, of which some may have no tensor of their own."""
        named = self.network.named_modules()
        return tuple(path for path, module in named if isinstance(module, torch.nn.Linear))

    @cached_property
    def _shared(self) -> frozenset[str]:
        tied = self.network.get_expanded_tied_weights_keys(all_submodels=True)
        return frozenset(tied) | frozenset(tied.values())

    def initializes(self, packed: Iterable[str]) -> bool:
        """Return whether the class sets up weights that it would not have as packed codes.

        It then fails to load them unless ``transformers`` is asked to dequantize.
        """
        paths = [self.module(name) for name in packed if name not in self.merged]
        chosen = [self.network.get_submodule(path) for path in paths]
        weights = [module._parameters.pop(_WEIGHT) for module in chosen]
        for module in self.network.modules():
            module._is_hf_initialized = False
        try:
            with silent(), torch.device("meta"):
                self.network.initialize_weights()
        except AttributeError:
            return True
        finally:
            for module, weight in zip(chosen, weights, strict=True):
                module._parameters[_WEIGHT] = weight
        return False


def reading_of(carrier: Carrier, *, by_names: bool = True) -> Reading | None:
    """Return how ``transformers`` will read a model; ``None`` where that cannot be known.

    Args:
        by_names: leave out decoders like Llama, whose layers are right by their names, which saves
            the import of ``transformers``.

    Raises:
        SpecError: it reads no codes into the model's class.
    """
    if not isinstance(carrier, CheckpointCarrier | TorchCarrier) or carrier.folder is None:
        return None
    if isinstance(carrier, TorchCarrier):
        network = meta_copy(carrier.module)
        return None if network is None else read_by(network, carrier.tensors())
    if by_names and is_llama_like(carrier.config):
        return None
    untied = carrier.source.untied
    return _reading_of_folder(carrier.folder, tuple(carrier.tensors()), untied, carrier.digest())


def float_class_of(carrier: Carrier) -> tuple[Any, str]:
    """Return the float class of a model from a folder as :func:`float_network` does.

    Raises:
        ValueError: the model came from no folder.
    """
    if carrier.folder is None:
        raise ValueError("the model came from no folder")
    untied = isinstance(carrier, CheckpointCarrier) and carrier.source.untied
    return float_network(carrier.folder, untied=untied)


@lru_cache(maxsize=2)
def _reading_of_folder(
    folder: Path, names: tuple[str, ...], untied: bool, _: str
) -> Reading | None:
    network, _why = float_network(folder, untied=untied)
    return None if network is None else read_by(network, names)


def read_by(network: Any, names: Iterable[str]) -> Reading:
    """Return how a network on the ``meta`` device reads tensors of these names.

    Raises:
        SpecError: ``transformers`` reads no codes into its class.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    quantizer = _quantizer()
    before = set(network.state_dict())
    try:
        with silent():
            quantizer._convert_model_for_quantization(network)
            mapping = get_model_conversion_mapping(network, hf_quantizer=quantizer)
    except ValueError as error:
        raise _unreadable(network, f"its own conversions fail: {reason_of(error)}") from error
    after = set(network.state_dict())
    codes = (
        f"{path}.{_WEIGHT}{ending}"
        for path, module in network.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        for ending in _CODES
    )
    follow = Names(network, mapping, codes)
    places: dict[str, str] = {}
    merged, changed, joined = set(), set(), set()
    for name in names:
        place, operations = follow.place(name)
        if place is None:
            continue
        places[name] = place
        ends = [follow.place(f"{name}{ending}")[0] for ending in _CODES]
        if not operations:
            arrives = all(end == f"{place}{e}" for end, e in zip(ends, _CODES, strict=True))
        else:
            arrives = _STACK in operations and all(end == place for end in ends)
            if arrives:
                merged.add(name)
        if not arrives and name.endswith(f".{_WEIGHT}"):
            changed.add(name)
            if _DEQUANTIZE in operations:
                joined.add(name)
    lost = before - after
    if lost and not after - before <= set(places.values()):
        what = f"it replaces {len(lost)} tensors such as {min(lost)!r} by layers of its own"
        raise _unreadable(network, what)
    return Reading(network, places, frozenset(merged), frozenset(changed), frozenset(joined))


class Names:
    """Follows the names of a checkpoint's tensors to those of a network's parameters.

    Args:
        mapping: the conversions of ``get_model_conversion_mapping``.
        more: names of parameters besides those that the network has.
    """

    def __init__(self, network: Any, mapping: Iterable[Any], more: Iterable[str] = ()):
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = list(mapping)
        self._prefix = network.base_model_prefix
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._operations = {
            pattern: [type(operation).__name__ for operation in entry.operations]
            for entry in self._converters
            for pattern in entry.source_patterns
        }
        self._state = {**network.state_dict(), **dict.fromkeys(more, True)}

    def place(self, name: str) -> tuple[str | None, list[str]]:
        """Return a tensor's parameter, or ``None``, and the operations that make it of tensors.

        As ``convert_and_load_state_dict_in_model`` in ``transformers.core_model_loading``.
        """
        from transformers.core_model_loading import rename_source_key

        place, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if place not in self._state and name in self._state:
            place, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        operations = self._operations[pattern] if pattern is not None else []
        return (place if place in self._state else None), operations


def _quantizer() -> Any:
    """Return the library's reader of codes without a configuration of codes.

    That needs compressed-tensors, what is asked of it here does not.
    """
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    quantizer = CompressedTensorsHfQuantizer.__new__(CompressedTensorsHfQuantizer)
    quantizer.pre_quantized = True
    quantizer.use_fp8_kernel = False
    method = QuantizationMethod.COMPRESSED_TENSORS
    quantizer.quantization_config = SimpleNamespace(quant_method=method, dequantize=False)  # type: ignore[assignment]  # see above
    return quantizer


def _unreadable(network: Any, why: str) -> SpecError:
    return SpecError(
        "layout compressed-tensors",
        f"transformers {library().__version__} reads no codes into a {type(network).__name__} "
        f"({why})",
        "write a spec with model.factory and the export format safetensors or onnx",
    )
