"""What a streamed checkpoint will look like, to the byte, before any of it is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.safetensors.code_layouts import (
    COMPRESSED_TENSORS,
    CodeLayout,
    caches_of,
)
from compressor.exporters.safetensors.compressed_tensors import Entry
from compressor.files import (
    disk_errors,
    file_sha256,
    json_sha256,
    publish,
    remove_stale_staging,
    staging,
)
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.checkpoint.folder import CARD, CONFIG, companions
from compressor.models.codec.headers import (
    INDEX,
    STORED_AS,
    Described,
    Layout,
    in_shards,
    index_text,
    layout,
    shard_names,
)
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.data import ALONE, Ranks
from compressor.types.layers import StoredTensor, WeightCodes
from compressor.types.rounded_inputs import CacheScheme, Part

DEFAULT_SHARD = 5_000_000_000
"""Bytes of a shard of a model that did not come in shards; what ``transformers`` uses."""

_METADATA = {"format": "pt"}  # transformers refuses files that do not say so
_VERSION = 1  # of the bytes written, for results that are resumed


@dataclass(frozen=True)
class PlannedShard:
    """One file that will be written.

    Attributes:
        entries: the tensors that will be in it, by name.
        sources: the tensors that it is made of, in the order in which they are read.
        codes: how those are stored that are quantized.
    """

    name: str
    layout: Layout
    entries: Mapping[str, Entry]
    sources: tuple[StoredTensor, ...]
    codes: CodeLayout

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.layout.nbytes

    @cached_property
    def read_bytes(self) -> int:
        """Bytes of the float tensors that it is made of: the work it takes."""
        return sum(tensor.float_nbytes for tensor in self.sources)


@dataclass(frozen=True)
class StreamPlan:
    """A checkpoint that will be written.

    Attributes:
        texts: the small files that are made: the configuration and the index, by name.
        companions: the files that are copied, by their place in the directory.
        digest: changes with everything that decides the bytes.
    """

    shards: tuple[PlannedShard, ...]
    texts: Mapping[str, bytes]
    companions: Mapping[str, Path]
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
            + sum(path.stat().st_size for path in self.companions.values())
        )

    def share(self, ranks: Ranks = ALONE) -> tuple[PlannedShard, ...]:
        """Return the shards that one of several processes writes.

        The largest shards go first, each to the process with the least work so far. All processes
        compute the same division, so each shard has one writer.
        """
        loads = [0] * ranks.size
        names = set()
        for shard in sorted(self.shards, key=lambda s: (-s.read_bytes, s.name)):
            least = min(range(ranks.size), key=lambda rank: (loads[rank], rank))
            loads[least] += shard.read_bytes
            if least == ranks.rank:
                names.add(shard.name)
        return tuple(shard for shard in self.shards if shard.name in names)


def plan_stream(
    carrier: Carrier,
    key: str = "",
    max_shard_size: int | None = None,
    codes: CodeLayout = COMPRESSED_TENSORS,
) -> StreamPlan:
    """Plan the files of a model in the layout of a directory; nothing is computed.

    Args:
        carrier: the model. A checkpoint's shards are mirrored.
        key: what else decides the bytes, such as a digest of the passes' options: results of
            another key are not resumed.
        max_shard_size: bytes of input that make a shard, in place of the input's own shards.
        codes: how quantized weights are stored.

    Raises:
        SpecError: the layout has no form for a tensor.
    """
    tensors = carrier.tensors()
    if not tensors:
        raise SpecError(f"layout {codes.name}", "the model has no tensors", "check the model")
    caches = caches_of(carrier)
    groups = _groups(carrier, tensors, max_shard_size)
    for scale in cache_scales(caches, tensors):
        beside = f"{scale.name.rpartition('.')[0]}."
        group = next(g for g in groups.values() if any(t.name.startswith(beside) for t in g))
        group.append(scale)
    shards = tuple(_planned(name, members, codes) for name, members in groups.items())
    texts = {}
    if len(shards) > 1:
        sizes = {s.name: {e.name: e.nbytes for e in s.entries.values()} for s in shards}
        texts[INDEX] = index_text(sizes)
    quantized = any(tensor.codes is not None for tensor in tensors.values())
    config = dict(carrier.config) if isinstance(carrier, CheckpointCarrier | TorchCarrier) else {}
    config.pop("quantization_config", None)
    if quantized or caches:
        config["quantization_config"] = codes.configuration(carrier)
    if config:
        # Not json_text: published configurations may hold Infinity, and come back as they were.
        texts[CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    others = {} if carrier.folder is None else companions(carrier.folder)
    copied = {place: path for place, path in others.items() if place not in (CONFIG, CARD)}
    digest = json_sha256(
        [
            _VERSION,
            key,
            carrier.digest() if isinstance(carrier, CheckpointCarrier) else "",
            [[s.name, hashlib.sha256(s.layout.header).hexdigest()] for s in shards],
            {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
            [[t.name, *_recipe(t.codes)] for t in tensors.values() if t.codes is not None],
            *([repr(dict(caches))] if caches else []),
        ]
    )
    return StreamPlan(shards, texts, copied, digest)


def cache_scales(
    caches: Mapping[str, CacheScheme], tensors: Mapping[str, StoredTensor]
) -> list[StoredTensor]:
    """Return the scales of keys and values, in the float type of their attention."""
    scales = []
    for path, scheme in caches.items():
        dtype = next(t.dtype for t in tensors.values() if t.name.startswith(f"{path}."))
        parts: tuple[tuple[str, Part], ...] = (("k_scale", "keys"), ("v_scale", "values"))
        for name, part in parts:
            read = partial(_scale_of, scheme, part, dtype)  # a plan has none yet
            scales.append(StoredTensor(f"{path}.{name}", (1,), dtype, read))
    return scales


def _scale_of(scheme: CacheScheme, part: Part, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(scheme.scales(part), dtype=dtype)


def _recipe(codes: WeightCodes) -> list[str]:
    """Return what decides a weight's bytes, besides its floats."""
    return [str(codes.scheme), *([] if codes.inputs is None else [repr(codes.inputs)])]


def _groups(
    carrier: Carrier, tensors: Mapping[str, StoredTensor], limit: int | None
) -> dict[str, list[StoredTensor]]:
    """Divide the tensors among shards, by the shards' names."""
    if limit is None and isinstance(carrier, CheckpointCarrier):
        shards = carrier.source.shards
        names = [shard.path.name for shard in shards]
        divided = [[tensors[n] for n in s.tensors if n in tensors] for s in shards]
        if len(set(names)) < len(names):
            names = []
        held = {name for shard in shards for name in shard.tensors}
        divided[-1] += [t for t in tensors.values() if t.name not in held]  # a pass has made them
    else:
        names = []
        divided = in_shards(tensors.values(), limit or DEFAULT_SHARD)
    filled = [members for members in divided if members]
    if not names or len(filled) == 1:
        return dict(zip(shard_names(len(filled)), filled, strict=True))
    return {name: members for name, members in zip(names, divided, strict=True) if members}


def _planned(name: str, sources: Sequence[StoredTensor], codes: CodeLayout) -> PlannedShard:
    entries = {entry.name: entry for tensor in sources for entry in codes.entries(tensor)}
    described = [
        Described(e.name, STORED_AS[e.dtype], e.shape, 8 * e.dtype.itemsize, e.nbytes)
        for e in entries.values()
    ]
    return PlannedShard(name, layout(described, _METADATA), entries, tuple(sources), codes)


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: its size, the SHA-256 of its bytes, and the checksums of its tensors."""

    path: Path
    nbytes: int
    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict)


def journal_of(path: Path) -> Path:
    """Return where the note about a finished shard lies."""
    return path.with_name(f".{path.name}.done.json")


def finished(shard: PlannedShard, directory: Path, plan: str) -> WrittenFile | None:
    """Return a shard that an earlier call finished; ``None`` where it has to be written.

    It counts only if it was written by the same plan and its bytes are still the same.
    """
    written = noted(shard, directory, plan)
    if written is None or file_sha256(written.path) != written.sha256:
        return None
    return written


def noted(shard: PlannedShard, directory: Path, plan: str) -> WrittenFile | None:
    """Return what the note beside a shard tells about it, without reading the shard."""
    path = directory / shard.name
    try:
        note = json.loads(journal_of(path).read_text(encoding="utf-8"))
        size = path.stat().st_size
    except (OSError, ValueError):
        return None
    expected = {"plan": plan, "bytes": size}
    same = isinstance(note, dict) and all(note.get(k) == v for k, v in expected.items())
    kinds = {"sha256": str, "tensors": dict}
    whole = same and all(isinstance(note.get(key), kind) for key, kind in kinds.items())
    if not whole or size != shard.nbytes:
        return None
    return WrittenFile(path, size, note["sha256"], note["tensors"])


def finish(plan: StreamPlan, directory: Path) -> tuple[WrittenFile, ...]:
    """Write the files that go with the shards, once all processes have written theirs.

    Returns:
        All files, the main one first.

    Raises:
        ArtifactError: a shard is missing.
        InputError: the disk is full.
    """
    written = []
    for shard in plan.shards:
        file = noted(shard, directory, plan.digest)
        if file is None:
            raise ArtifactError(
                f"shard {shard.name!r}",
                "is missing or was written for another plan",
                "run the same command again",
            )
        written.append(file)
    remove_stale_staging(directory)
    with disk_errors(directory), staging(directory) as folder:
        copied = {place: path.read_bytes() for place, path in plan.companions.items()}
        for place, text in {**plan.texts, **copied}.items():
            draft, target = folder / place, directory / place
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(text)
            publish(draft, target)
            written.append(WrittenFile(target, target.stat().st_size, file_sha256(target)))
        for shard in plan.shards:
            journal_of(directory / shard.name).unlink()
    return tuple(sorted(written, key=lambda file: file.path.name != plan.main))
