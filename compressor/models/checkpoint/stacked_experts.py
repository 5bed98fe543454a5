"""Experts that a checkpoint holds in two tensors, as linear layers of their own.

Llama 4 stacks the experts of a block: ``gate_up_proj [experts, hidden, 2 * inner]`` and
``down_proj [experts, inner, hidden]``. Where weights are codes, ``transformers`` (its
``SequentialLlama4TextExperts``) looks for the layers of each expert, ``0.gate_proj.weight [inner,
hidden]`` and so on, as in the class ``Llama4TextMLP``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from compressor.models.checkpoint.carrier import CheckpointCarrier, numpy_name
from compressor.models.checkpoint.folder import layer_of
from compressor.models.codec.headers import ShardHeader, TensorHeader
from compressor.types.layers import StoredTensor

_MODELS = {"llama4", "llama4_text"}
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_AXES = 3
# The layers that lie beside each other in the last axis of a stack.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def unstacked(carrier: CheckpointCarrier) -> CheckpointCarrier:
    """Return a checkpoint whose experts are layers of their own; the same one if none are stacked.

    Nothing is read before it is asked for. Each layer belongs to the shard of its stack.
    """
    if not _has_stacks(carrier.config):
        return carrier
    before = carrier.tensors()
    single = {name: tuple(_singles(tensor)) for name, tensor in before.items() if _stacked(tensor)}
    if not single:
        return carrier
    tensors = {t.name: t for name, held in before.items() for t in single.get(name, (held,))}
    layers = []
    known = {layer.weight: layer for layer in carrier.layers()}
    for name, tensor in tensors.items():
        made = layer_of(name, tensor.shape, numpy_name(tensor.dtype), carrier.config)
        layer = known.get(name) if name in before else made
        layers += [] if layer is None else [layer]
    shards = tuple(_divided(shard, single) for shard in carrier.source.shards)
    return CheckpointCarrier(
        replace(carrier.source, shards=shards), tensors, layers, carrier.caches
    )


def restacked(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Mapping[str, torch.Tensor]:
    """Return the weights of :func:`unstacked` under the names of the checkpoint, stacked again.

    Args:
        config: the content of ``config.json``. Those of other models are returned as they are.
    """
    if not _has_stacks(config):
        return weights
    rows: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    result = {}
    for name, weight in weights.items():
        found = _SINGLE.fullmatch(name)
        if found is None:
            result[name] = weight
            continue
        stack = next(stack for stack, parts in _PARTS.items() if found[3] in parts)
        rows.setdefault(f"{found[1]}.{stack}", {}).setdefault(int(found[2]), {})[found[3]] = weight
    for name, experts in rows.items():
        parts = _PARTS[name.rpartition(".")[2]]
        stacked = [torch.cat([experts[e][part] for part in parts]).T for e in sorted(experts)]
        result[name] = torch.stack(stacked).contiguous()
    return result


def _has_stacks(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")) in _MODELS


def _stacked(tensor: StoredTensor) -> bool:
    found = _STACK.fullmatch(tensor.name)
    divides = (
        found is not None and tensor.shape[-1:] and tensor.shape[-1] % len(_PARTS[found[2]]) == 0
    )
    return bool(divides) and len(tensor.shape) == _AXES and tensor.codes is None


def _singles(tensor: StoredTensor) -> Iterator[StoredTensor]:
    path, _, stack = tensor.name.rpartition(".")
    parts = _PARTS[stack]
    experts, columns, rows = tensor.shape
    shape = (rows // len(parts), columns)
    for expert in range(experts):
        for number, part in enumerate(parts):
            read = partial(_read, tensor, expert, number, len(parts))
            yield StoredTensor(f"{path}.{expert}.{part}.weight", shape, tensor.dtype, read)


def _read(tensor: StoredTensor, expert: int, part: int, parts: int) -> torch.Tensor:
    return tensor.read()[expert].chunk(parts, -1)[part].T.contiguous()


def _divided(shard: ShardHeader, single: Mapping[str, tuple[StoredTensor, ...]]) -> ShardHeader:
    """Return a shard that names layers where it has stacks, all at the place of their stack."""
    tensors = {}
    for name, header in shard.tensors.items():
        for made in single.get(name, ()):
            size = made.elements * made.dtype.itemsize
            tensors[made.name] = TensorHeader(
                made.name, header.dtype, made.shape, header.offset, size
            )
        if name not in single:
            tensors[name] = header
    return replace(shard, tensors=tensors)
