"""Read a GGUF file: its tensors by the library's own decoders, and the network that it describes.

Nothing but the file is read. So what is found of it here is what a program that serves it has.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compressor.errors import ArtifactError, ModelError, listed
from compressor.exporters.gguf.architectures import ARCHITECTURES, ROPE_FACTORS
from compressor.exporters.gguf.experts import stack_parts
from compressor.exporters.gguf.file import ENDINGS
from compressor.exporters.gguf.header import read_header
from compressor.exporters.gguf.shapes import config_values
from compressor.exporters.safetensors.transformers_runner import FAILURES, NetworkRunner, runtime
from compressor.models.transformers.classes import silent
from compressor.models.transformers.networks import loaded, reason_of

_MALFORMED = (AttributeError, LookupError, OverflowError, OSError, TypeError, ValueError)
_AGAIN = "export it again"


class GgufFile:
    """An open file, whose tensors stay in it.

    Raises:
        ArtifactError: it is not a GGUF file, or is cut or damaged.
    """

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self.subject = f"artifact {path.name!r}"
        try:
            read_header(path)
        except ModelError as error:
            raise ArtifactError(self.subject, error.problem, _AGAIN) from error
        try:
            self._reader = GGUFReader(path)
            self._tensors = {str(tensor.name): tensor for tensor in self._reader.tensors}
        except _MALFORMED as error:
            raise ArtifactError(
                self.subject, f"is not a complete GGUF file ({reason_of(error)})", _AGAIN
            ) from error

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._tensors)

    def value(self, key: str) -> Any:
        """Return what the file holds under a key; ``None`` without it."""
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except _MALFORMED as error:
            problem = f"has no readable {key!r} ({reason_of(error)})"
            raise ArtifactError(self.subject, problem, _AGAIN) from error

    def kind(self, name: str) -> str:
        """Return the format of a tensor."""
        return str(self._tensors[name].tensor_type.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the axes of a tensor, those that vary slowest first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return what a tensor means, float32.

        Args:
            index: in its first axis, if not all of it is wanted.

        Raises:
            ArtifactError: its type cannot be decoded.
        """
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        part, shape = slice(None) if index is None else index, self.shape(name)
        try:
            values = dequantize(tensor.data[part], tensor.tensor_type)
        except (NotImplementedError, *_MALFORMED) as error:
            problem = f"has {name!r}, which cannot be decoded ({reason_of(error)})"
            raise ArtifactError(self.subject, problem, _AGAIN) from error
        return torch.tensor(values, dtype=torch.float32).reshape(
            shape if index is None else shape[1:]
        )

    def raw(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return the bytes of a tensor, uint8; of one index in its first axis, if not of all."""
        stored = self._tensors[name].data
        part = stored if index is None else stored[index]
        return torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8)


class GgufRunner(NetworkRunner):
    """The network that a GGUF file describes, in float32.

    Raises:
        ArtifactError: the file is damaged, or its tensors are not those of the network.
    """

    def __init__(self, path: Path):
        file = GgufFile(path)
        network = network_of(file)
        super().__init__(network, file.subject, f"{runtime()}, weights read from GGUF")


def network_of(file: GgufFile) -> Any:
    """Return the network that a file describes, with its weights in float32.

    Raises:
        ArtifactError: the file describes none, or misses some of its tensors.
    """
    kind, network_class, config = _class_of(file)
    architecture = ARCHITECTURES[kind]
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    try:
        if config.num_hidden_layers > len(file.names):
            raise ValueError(f"{config.num_hidden_layers} blocks of {len(file.names)} tensors")
        with silent(), torch.device("meta"):
            empty = network_class(config)
    except FAILURES as error:
        problem = f"describes no network ({reason_of(error)})"
        raise ArtifactError(file.subject, problem, _AGAIN) from error
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == architecture.name)
    mapping = get_tensor_name_map(number, config.num_hidden_layers)
    weights: dict[str, torch.Tensor] = {}
    read = set()
    for name, parameter in empty.named_parameters():
        places = [str(mapping.get_name(part, ENDINGS)) for part in stack_parts(name)]
        parts = [_wanted(file, place, tuple(parameter.shape), len(places)) for place in places]
        place, value = places[0], torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        heads = {
            "query": config.num_attention_heads,
            "key": config.num_key_value_heads,
        }.get(architecture.turned(place))
        value = _unturned(value, heads) if heads else value
        weights[name] = value - 1 if architecture.adds_one(place) else value
        read.update(places)
    if strange := sorted(file.names - read - {ROPE_FACTORS}):
        problem = f"has {listed(strange)}, which a {kind} has not"
        raise ArtifactError(file.subject, problem, _AGAIN)
    network, loading = loaded(network_class, config, weights, torch.float32)
    if loading["missing_keys"] - set(empty._tied_weights_keys or ()):
        problem = f"gives no values for {listed(sorted(loading['missing_keys']))}"
        raise ArtifactError(file.subject, problem, _AGAIN)
    if ROPE_FACTORS in file.names:
        network.model.rotary_emb.inv_freq /= file.read(ROPE_FACTORS)
    return network.eval()


def _wanted(file: GgufFile, place: str, shape: tuple[int, ...], parts: int) -> torch.Tensor:
    """Return a tensor of a file, one of so many that a parameter has beside each other.

    Args:
        shape: of the parameter.
    """
    wanted = shape if parts == 1 else (shape[0], shape[1] // parts, *shape[2:])
    if place not in file.names or file.shape(place) != wanted:
        have = list(file.shape(place)) if place in file.names else "none"
        problem = f"has {have} as {place!r}, and {list(wanted)} is described"
        raise ArtifactError(file.subject, problem, _AGAIN)
    return file.read(place)


def _class_of(file: GgufFile) -> tuple[str, Any, Any]:
    """Return the ``model_type``, the class and the configuration that a file describes."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        kind, values = config_values(file.value, file.names)
        auto = importlib.import_module("transformers.models.auto")
        with silent():
            config = auto.AutoConfig.for_model(kind, **_known(values))
            return kind, auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config
    except (*FAILURES, StrictDataclassError) as error:
        problem = f"describes no model ({reason_of(error)})"
        raise ArtifactError(file.subject, problem, _AGAIN) from error


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a configuration; special tokens have no part in what is computed."""
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**values, **none}


def _unturned(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put rows of query or key back in the order of ``transformers``."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
