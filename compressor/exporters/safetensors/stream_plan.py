"""What a streamed checkpoint will look like, to the byte, before any of it is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compressor.errors import SpecError
from compressor.exporters.safetensors.compressed_tensors import (
    Entry,
    quantization_config,
    stored_entries,
)
from compressor.files import json_sha256, json_text
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.checkpoint.folder import CONFIG, companions
from compressor.models.codec.headers import (
    INDEX,
    STORED_AS,
    WEIGHTS,
    Described,
    Layout,
    layout,
)
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.data import ALONE, Ranks
from compressor.types.tensors import StoredTensor

DEFAULT_SHARD = 5_000_000_000
"""Bytes of a shard of a model that did not come in shards; what ``transformers`` uses."""

_METADATA = {"format": "pt"}  # transformers refuses files that do not say so
_VERSION = 1  # of the bytes written, for results that are resumed


@dataclass(frozen=True)
class PlannedShard:
    """One file that will be written.

    Attributes:
        name: its name.
        layout: its header, and where each tensor goes.
        entries: the tensors that will be in it, by name.
        sources: the tensors that it is made of, in the order in which they are read.
    """

    name: str
    layout: Layout
    entries: Mapping[str, Entry]
    sources: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.layout.nbytes

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the float tensors that it is made of: the work it takes."""
        return sum(source_bytes(tensor) for tensor in self.sources)


@dataclass(frozen=True)
class StreamPlan:
    """A checkpoint that will be written.

    Attributes:
        shards: the files of weights.
        texts: the small files that are made: the configuration and the index, by name.
        companions: the files that are copied.
        digest: changes with everything that decides the bytes.
    """

    shards: tuple[PlannedShard, ...]
    texts: Mapping[str, bytes]
    companions: tuple[Path, ...]
    digest: str

    @property
    def main(self) -> str:
        """The file that stands for the whole: the index, or the only shard."""
        return INDEX if INDEX in self.texts else self.shards[0].name

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return (
            sum(shard.nbytes for shard in self.shards)
            + sum(len(text) for text in self.texts.values())
            + sum(path.stat().st_size for path in self.companions)
        )

    @property
    def input_bytes(self) -> int:
        """Bytes of the float tensors that are read."""
        return sum(shard.read_bytes for shard in self.shards)

    def share(self, ranks: Ranks = ALONE) -> tuple[PlannedShard, ...]:
        """Return the shards that one of several processes writes.

        The largest come first, each to the process that has least; so all processes agree, and
        each shard has one writer.
        """
        loads = [0] * ranks.size
        own = set()
        for shard in sorted(self.shards, key=lambda s: (-s.read_bytes, s.name)):
            least = min(range(ranks.size), key=lambda rank: (loads[rank], rank))
            loads[least] += shard.read_bytes
            if least == ranks.rank:
                own.add(shard.name)
        return tuple(shard for shard in self.shards if shard.name in own)


def source_bytes(tensor: StoredTensor) -> int:
    """Bytes of a tensor before it was quantized."""
    return tensor.elements * tensor.dtype.itemsize


def plan_stream(carrier: Carrier, key: str = "", max_shard_size: int | None = None) -> StreamPlan:
    """Plan the files of a model in the layout of compressed-tensors; nothing is computed.

    Args:
        carrier: the model. A checkpoint's shards are mirrored.
        key: what else decides the bytes, such as a digest of the passes' options: results of
            another key are not resumed.
        max_shard_size: bytes of input that make a shard, in place of the input's own shards.

    Raises:
        SpecError: the layout has no form for a tensor.
    """
    tensors = carrier.tensors()
    if not tensors:
        raise SpecError("layout compressed-tensors", "the model has no tensors", "check the model")
    groups = _groups(carrier, tensors, max_shard_size)
    shards = tuple(_planned(name, members) for name, members in groups.items())
    texts = {}
    if len(shards) > 1:
        texts[INDEX] = _index(shards)
    quantized = any(tensor.codes is not None for tensor in tensors.values())
    config = dict(_config(carrier))
    config.pop("quantization_config", None)
    if quantized:
        config["quantization_config"] = quantization_config(tensors)
    if config:
        texts[CONFIG] = _json(config)
    others = () if carrier.folder is None else companions(carrier.folder)
    copied = tuple(path for path in others if path.name != CONFIG)
    digest = json_sha256(
        [
            _VERSION,
            key,
            carrier.digest() if isinstance(carrier, CheckpointCarrier) else "",
            [[s.name, hashlib.sha256(s.layout.header).hexdigest()] for s in shards],
            {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
            [[t.name, str(t.codes.scheme)] for t in tensors.values() if t.codes is not None],
        ]
    )
    return StreamPlan(shards, texts, copied, digest)


def _config(carrier: Carrier) -> Mapping[str, Any]:
    return carrier.config if isinstance(carrier, CheckpointCarrier | TorchCarrier) else {}


def _groups(
    carrier: Carrier, tensors: Mapping[str, StoredTensor], limit: int | None
) -> dict[str, list[StoredTensor]]:
    """Divide the tensors among shards, by the shards' names."""
    if limit is None and isinstance(carrier, CheckpointCarrier):
        shards = carrier.source.shards
        found = [[tensors[n] for n in s.tensors if n in tensors] for s in shards]
        names = [shard.path.name for shard in shards]
    else:
        found = _filled(tensors.values(), limit or DEFAULT_SHARD)
        names = []
    held = [(index, members) for index, members in enumerate(found) if members]
    if len(held) == 1:
        return {WEIGHTS: held[0][1]}
    if len(set(names)) == len(found):
        return {names[index]: members for index, members in held}
    count = len(held)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": members
        for number, (_, members) in enumerate(held, 1)
    }


def _filled(tensors: Iterable[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    """Put tensors into shards in their order, so that none but a single tensor is over a limit."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = tensor.nbytes
        if shards[-1] and size + own > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += own
    return shards


def _planned(name: str, sources: Sequence[StoredTensor]) -> PlannedShard:
    entries = {entry.name: entry for tensor in sources for entry in entries_of(tensor)}
    described = [
        Described(e.name, STORED_AS[e.dtype], e.shape, 8 * e.dtype.itemsize, e.nbytes)
        for e in entries.values()
    ]
    return PlannedShard(name, layout(described, _METADATA), entries, tuple(sources))


def entries_of(tensor: StoredTensor) -> tuple[Entry, ...]:
    """Describe what a tensor is stored as: itself, or its codes and what belongs to them.

    Raises:
        SpecError: the layout has no form for it.
    """
    if tensor.codes is not None:
        return stored_entries(tensor)
    if tensor.dtype not in STORED_AS:
        raise SpecError(
            f"tensor {tensor.name!r}",
            f"is {str(tensor.dtype).removeprefix('torch.')}, which safetensors does not hold",
            "cast it to another type, or leave out this export",
        )
    rows = tensor.shape[0] if tensor.shape else 1
    bits = 8 * source_bytes(tensor) // rows if rows else 0
    return (Entry(tensor.name, tensor.dtype, tensor.shape, bits),)


def _index(shards: Sequence[PlannedShard]) -> bytes:
    places = {entry: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json_text(content).encode()


def _json(config: Mapping[str, Any]) -> bytes:
    # Not json_text: published configurations may hold Infinity, and come back as they were.
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
