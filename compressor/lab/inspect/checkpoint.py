"""Inspect checkpoints: named tensors without a graph, and what a folder says of its
quantization."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from compressor.errors import ModelError
from compressor.lab.inspect.contents import (
    Counts,
    ModelContents,
    TensorRow,
    count_elements,
    not_finite_note,
    parts_of,
    percent,
)
from compressor.models.checkpoint.carrier import numpy_name
from compressor.models.checkpoint.folder import CONFIG, read_config, read_shards
from compressor.models.checkpoint.reading import FileTensor, MappedFile, ReadAhead
from compressor.models.checkpoint.weight_files import read_weights, weight_file_paths
from compressor.models.codec.headers import DTYPES, PAIRS, ShardHeader
from compressor.progress import Progress

# How the weights of quantized Hugging Face checkpoints and their helpers are called.
PACKED = ("weight_packed", "qweight")
SHAPE = "weight_shape"
_IN_BLOCK = re.compile(r"\.\d+\.")
_SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "scales")
_ZERO_POINTS = ("weight_zero_point", "qzeros")
_OTHERS = (
    SHAPE,
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "g_idx",
)


@dataclass(frozen=True)
class Group:
    """Layers that are quantized alike.

    Attributes:
        targets: modules' names, regular expressions after ``re:``, or classes.
        bits: of a weight; ``None`` where the file does not say.
        words: the scheme, such as ``int4/group 128``.
        size: weights that share a scale; ``None`` where a whole row does.
    """

    targets: tuple[str, ...]
    bits: int | None
    words: str
    size: int | None

    def holds(self, module: str) -> bool:
        """Return whether a module belongs to it by name; classes cannot be matched here."""
        for target in self.targets:
            if target.startswith("re:"):
                try:
                    if re.match(target[3:], module):
                        return True
                except re.error:  # it was never a pattern, whoever wrote it
                    continue
            elif target == module:
                return True
        return False


@dataclass(frozen=True)
class Quantization:
    """The ``quantization_config`` of a folder.

    Attributes:
        words: all of it, in short; empty without one.
        groups: how layers are quantized; the first stands for those that no other one names.
    """

    words: str = ""
    groups: tuple[Group, ...] = ()

    def group_of(self, module: str) -> Group | None:
        """Return how a module that is quantized is quantized."""
        named = (group for group in self.groups if group.holds(module))
        return next(named, self.groups[0] if self.groups else None)


def role_of(name: str) -> str:
    """Return what a tensor is by its name: ``scale``, ``zero point``, ``helper`` or nothing."""
    last = name.rpartition(".")[2]
    if last in _SCALES:
        return "scale"
    if last in _ZERO_POINTS:
        return "zero point"
    return "helper" if last in _OTHERS else ""


def read_quantization(folder: Path) -> Quantization:
    """Read ``quantization_config`` of a folder; one that cannot be read says nothing."""
    try:
        quantization = read_config(folder / CONFIG).get("quantization_config")
    except ModelError:
        return Quantization()
    if not isinstance(quantization, dict):
        return Quantization()
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        read = tuple(_group(group) for group in groups.values() if isinstance(group, dict))
    else:
        read = (_group({"weights": quantization}),)
    parts = [
        str(quantization.get(key)) for key in ("quant_method", "format") if quantization.get(key)
    ]
    if len({(group.bits, group.words) for group in read}) > 1:
        parts.append(" and ".join(dict.fromkeys(group.words for group in read)))
    elif read:
        parts += [f"{read[0].bits} bits"] if read[0].bits else []
        parts += [f"group {read[0].size}"] if read[0].size else []
    return Quantization(", ".join(parts), read)


def _group(group: dict[str, Any]) -> Group:
    weights = group.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    targets = group.get("targets")
    names = tuple(str(t) for t in targets) if isinstance(targets, list) else ()
    bits = weights.get("num_bits", weights.get("bits", weights.get("w_bit")))
    bits = bits if isinstance(bits, int) else None
    size = weights.get("group_size", weights.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else None
    kind = "float" if weights.get("type") == "float" else "int"
    span = f"group {size}" if size else str(weights.get("strategy") or "channel")
    asymmetric = " asym" if weights.get("symmetric") is False else ""
    return Group(names, bits, f"{kind}{bits}/{span}{asymmetric}" if bits else "", size)


@dataclass(frozen=True)
class _Counted:
    """A tensor and what was counted in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    counts: Counts

    @property
    def elements(self) -> int:
        return prod(self.shape)


def inspect_checkpoint(path: Path, progress: Progress) -> ModelContents:
    """Describe a weight file or a directory of them; tensors are streamed.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    files = weight_file_paths(path)
    sizes = {f.name: f.stat().st_size for f in files}
    quantization = read_quantization(path if path.is_dir() else path.parent)
    streamed = files[0].suffix == ".safetensors"
    tensors: list[_Counted] = []
    with progress.stage("read tensors", sum(sizes.values()) if streamed else None) as advance:
        done = 0
        shards = map(_in_shard, read_shards(path) if streamed else ())
        for tensor in chain.from_iterable(shards) if streamed else _in_pickle(path):
            tensors.append(tensor)
            done += tensor.nbytes
            advance(done)
    shapes = _shapes(path) if streamed and quantization.groups else {}
    rows: list[TensorRow] = []
    weights = zeros = counted = 0
    for tensor in tensors:
        rows.append(_row(tensor, quantization))
        count = _weights(tensor, quantization, shapes)
        weights += count
        if count == tensor.elements:
            zeros, counted = zeros + tensor.counts.zeros, counted + count
    return ModelContents(
        kind="checkpoint",
        path=str(path),
        files=sizes,
        tensors=tuple(rows),
        parameters=weights,
        zeros=percent(zeros, counted),
        quantization=quantization.words,
        notes=tuple(not_finite_note(f.name, n) for f in tensors if (n := f.counts.not_finite)),
    )


@dataclass(frozen=True)
class WeightSummary:
    """What headers say of a checkpoint's weights.

    Attributes:
        tensors: how many there are.
        parameters: the floats among their elements.
        bfloat16: most of these are that.
        experts: some belong to experts.
        group: of how many columns one scale is usual: 128, but 32 where that divides the rows of
            most weights of blocks and 128 does not.
    """

    tensors: int
    parameters: int
    bfloat16: bool
    experts: bool
    group: Literal[32, 128]


def weight_summary(path: Path) -> WeightSummary:
    """Return what the headers of a checkpoint say.

    Raises:
        SpecError: it holds no weight files.
        ModelError: a file is cut or not a weight file.
    """
    tensors = read_weights(path, headers_only=True)
    sizes, divided = Counter[torch.dtype](), Counter[int]()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
        if tensor.ndim > 1 and _IN_BLOCK.search(name):
            for group in (32, 128):
                divided[group] += 0 if tensor.shape[-1] % group else tensor.numel()
    return WeightSummary(
        len(tensors),
        sizes.total(),
        bool(sizes) and sizes.most_common(1)[0][0] == torch.bfloat16,
        any(".experts." in name for name in tensors),
        32 if 2 * divided[128] < divided[32] else 128,
    )


def _in_pickle(path: Path) -> Iterator[_Counted]:
    for name, tensor in read_weights(path).items():
        flat = tensor.detach().reshape(-1)
        parts = parts_of(flat.numel(), tensor.itemsize)
        counts = sum((count_elements(flat[start:stop]) for start, stop in parts), Counts())
        yield _Counted(name, tuple(tensor.shape), numpy_name(tensor.dtype), tensor.nbytes, counts)


def _in_shard(shard: ShardHeader) -> Iterator[_Counted]:
    """Count every tensor of a file, block by block, with the disk a little ahead."""
    file = MappedFile(shard.path, shard.nbytes)
    flat = {
        # As one row of bytes or elements, which can be cut anywhere.
        name: FileTensor(
            file,
            header._replace(dtype="U8", shape=(header.nbytes,))
            if header.dtype == PAIRS
            else header._replace(shape=(prod(header.shape),)),
        )
        for name, header in shard.tensors.items()
    }
    cuts = {
        name: parts_of(tensor.header.shape[0], tensor.dtype.itemsize)
        for name, tensor in flat.items()
    }
    spans = [flat[name].span(*cut) for name, pieces in cuts.items() for cut in pieces]
    with ReadAhead(spans) as ahead:
        for name, header in shard.tensors.items():
            pairs = header.dtype == PAIRS
            count = partial(count_elements, pairs=pairs)
            counts = Counts()
            for start, stop in cuts[name]:
                with ahead.using(flat[name].span(start, stop)):
                    counts += count(flat[name].rows(start, stop))
            dtype = "float4_e2m1fn" if pairs else numpy_name(DTYPES[header.dtype])
            yield _Counted(name, header.shape, dtype, header.nbytes, counts)


def _row(tensor: _Counted, quantization: Quantization) -> TensorRow:
    role = role_of(tensor.name)
    module, _, last = tensor.name.rpartition(".")
    group = quantization.group_of(module) if last in PACKED else None
    packed = last in PACKED
    return TensorRow(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        bytes=tensor.nbytes,
        # A word of packed codes that is 0 says nothing about weights.
        zeros=None if packed or role else percent(tensor.counts.zeros, tensor.elements),
        quantization=group.words if group is not None else role.replace("helper", ""),
    )


def _weights(
    tensor: _Counted, quantization: Quantization, shapes: dict[str, tuple[int, ...]]
) -> int:
    """Return how many weights a tensor holds: none, if it is a scale or a counter."""
    if role_of(tensor.name):
        return 0
    module, _, last = tensor.name.rpartition(".")
    group = quantization.group_of(module)
    if last in PACKED:
        if module in shapes:
            return prod(shapes[module])
        return tensor.nbytes * 8 // group.bits if group is not None and group.bits else 0
    codes = group is not None and group.bits is not None and last == "weight"
    floating = "float" in tensor.dtype
    return tensor.elements if codes or floating else 0


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for shard in read_shards(path):
        file = MappedFile(shard.path, shard.nbytes)
        for name, header in shard.tensors.items():
            module, _, last = name.rpartition(".")
            if last == SHAPE and header.dtype in ("I64", "I32") and len(header.shape) == 1:
                shapes[module] = tuple(int(n) for n in FileTensor(file, header)())
    return shapes
