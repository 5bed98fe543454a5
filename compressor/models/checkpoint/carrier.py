"""The carrier of bare checkpoints: named weights in safetensors files, without a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from compressor.errors import ModelError, SpecError
from compressor.files import json_sha256
from compressor.models.checkpoint.adapters import check_no_adapter
from compressor.models.checkpoint.expert_headers import with_single_experts
from compressor.models.checkpoint.folder import (
    CONFIG,
    Checkpoint,
    check_config,
    layer_of,
    read_checkpoint,
)
from compressor.models.checkpoint.reading import FileTensor, MappedFile
from compressor.models.checkpoint.rows import changed, widen_float8
from compressor.models.codec.headers import DTYPES, TensorHeader
from compressor.models.element_types import natural_type
from compressor.types.carrier import Capability, WeightChange
from compressor.types.layers import Layer, Scheme, StoredTensor, WeightCodes
from compressor.types.rounded_inputs import CacheScheme
from compressor.types.tensors import TensorSpec

# Tensors that hold the codes of others: the checkpoint is quantized already.
_PART = re.compile(r"(^|\.)(parametrizations\.\w+\.\w+|\w+_(g|v|orig))$")
"""Ends the names of what PyTorch's parametrizations, weight norm and masks compute a weight of."""
_CODES = re.compile(r".*\.(?:weight_packed|qweight|qzeros|g_idx|weight_global_scale|absmax)")


class CheckpointCarrier:
    """Named weights without the model that computes with them.

    Float8 weights of layers appear as wider floats, their scales multiplied in.

    Args:
        tensors: its tensors, of which passes may have changed some.
        layers: its layers, in the order of storage.
        caches: how attention rounds the keys and values that it keeps, by its path in the network;
            nothing for attention that keeps them as they are.
    """

    kind = "checkpoint"
    offers = frozenset({Capability.WEIGHTS})
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __init__(
        self,
        source: Checkpoint,
        tensors: Mapping[str, StoredTensor],
        layers: Sequence[Layer],
        caches: Mapping[str, CacheScheme] = MappingProxyType({}),
    ):
        self.caches = caches
        self.source = source
        self._tensors = dict(tensors)
        self._layers = tuple(layers)

    @property
    def folder(self) -> Path | None:
        """The folder whose configuration and tokenizer belong to it."""
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``; empty without one."""
        return self.source.config

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        return tuple(shard.path for shard in self.source.shards)

    @cached_property
    def _by_weight(self) -> dict[str, Layer]:
        return {layer.weight: layer for layer in self._layers}

    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of storage."""
        return self._layers

    def weight(self, layer: Layer) -> torch.Tensor:
        """The layer's weight in its stored shape; its codes, where it has been quantized."""
        tensor = self._tensors[layer.weight]
        if tensor.codes is None:
            return tensor.read()
        owner = tensor.codes.layer
        return owner.stored(tensor.codes.compute(owner.canonical(tensor.read())).codes)

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Everything that the checkpoint holds, by name, in the order of storage."""
        return dict(self._tensors)

    def with_weights(self, changes: Mapping[str, torch.Tensor]) -> CheckpointCarrier:
        """Return a carrier with some tensors replaced.

        Raises:
            KeyError: there is no tensor of a name.
        """
        replaced = {}
        for name, tensor in changes.items():
            if name not in self._tensors:
                raise KeyError(f"no tensor {name!r}")
            stored = tensor.detach().contiguous()
            replaced[name] = StoredTensor(name, tuple(stored.shape), stored.dtype, stored.detach)
        layers = [
            replace(layer, shape=new.shape, dtype=numpy_name(new.dtype))
            if (new := replaced.get(layer.weight)) is not None
            else layer
            for layer in self._layers
        ]
        return self._like({**self._tensors, **replaced}, layers)

    def with_changes(self, changes: Mapping[str, WeightChange]) -> CheckpointCarrier:
        """Return a carrier with some float weights changed as they are read.

        Raises:
            KeyError: no layer has a float weight of a name.
        """
        tensors = dict(self._tensors)
        for name, change in changes.items():
            before = tensors[name] if name in self._by_weight else None
            if before is None or before.codes is not None:
                raise KeyError(f"no layer has a float weight {name!r}")
            tensors[name] = replace(before, read=changed(before.read, change))
        return self._like(tensors, self._layers)

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> CheckpointCarrier:
        """Return a carrier with some float weights stored as codes, computed when they are read.

        Raises:
            KeyError: no layer has a weight of a name.
        """
        for name in changes:
            if name not in self._by_weight:
                raise KeyError(f"no layer has a weight {name!r}")
        tensors = {
            name: replace(tensor, codes=changes.get(name, tensor.codes))
            for name, tensor in self._tensors.items()
        }
        layers = [
            replace(layer, dtype=code_name(changes[layer.weight].scheme))
            if layer.weight in changes
            else layer
            for layer in self._layers
        ]
        return self._like(tensors, layers)

    def with_own_output(self, table: str, output: str) -> CheckpointCarrier:
        """Return a carrier whose output layer has the weight of its table as its own.

        Its configuration says so. Nothing is read; the weight is written twice.

        Args:
            table: name of the table's weight.
            output: name that the output layer's weight gets.
        """
        weight = self._tensors[table]
        config = {**self.config, "tie_word_embeddings": False}
        source = replace(self.source, config=config, untied=True)
        layer = layer_of(output, weight.shape, numpy_name(weight.dtype), config)
        layers = [] if layer is None or output in self._by_weight else [layer]
        tensors = {**self._tensors, output: replace(weight, name=output)}
        return self._like(tensors, [*self._layers, *layers], source)

    def _like(
        self,
        tensors: Mapping[str, StoredTensor],
        layers: Sequence[Layer],
        source: Checkpoint | None = None,
    ) -> CheckpointCarrier:
        return CheckpointCarrier(source or self.source, tensors, layers, self.caches)

    def graph(self, *_: object, **__: object) -> NoReturn:
        """Raise ``SpecError``: there is no graph."""
        _weights_only("graph")

    with_graph = with_channels = with_trainable_graph = graph

    def trainable(self) -> NoReturn:
        """Raise ``SpecError``: there is no module."""
        _weights_only("training")

    def runner(self, taps: Sequence[str] = ()) -> NoReturn:  # noqa: ARG002
        """Raise ``SpecError``: it cannot be run."""
        _weights_only("run")

    def save(self, directory: Path) -> None:
        """Write nothing: passes leave recipes on a bare checkpoint, not tensors."""

    def restore(self, directory: Path) -> CheckpointCarrier:  # noqa: ARG002
        """Return this carrier."""
        return self

    @property
    def meaning(self) -> dict[str, object]:
        """What decides what the tensors of its files compute, as JSON values."""
        return {"config": dict(self.config)}

    def digest(self) -> str:
        """Return a key of the checkpoint, without reading its data.

        It changes with the names, sizes and times of its files, their headers, and what decides
        what they compute.
        """
        shards = [
            [
                shard.path.name,
                shard.nbytes,
                shard.path.stat().st_mtime_ns,
                [[t.name, t.dtype, t.shape, t.offset] for t in shard.tensors.values()],
            ]
            for shard in self.source.shards
        ]
        return json_sha256([shards, self.meaning])


def _weights_only(what: str) -> NoReturn:
    raise SpecError(
        f"the model's {what}",
        "a bare checkpoint offers weights only",
        "set model.factory (for example transformers.AutoModelForCausalLM)",
    )


def numpy_name(dtype: torch.dtype) -> str:
    """Return numpy's name (with ``ml_dtypes``) for a torch dtype."""
    return natural_type(dtype).numpy().name


def code_name(scheme: Scheme) -> str:
    """Return numpy's name (with ``ml_dtypes``) for the codes of a scheme."""
    if scheme.element == "int":
        return f"{'int' if scheme.signed else 'uint'}{scheme.bits}"
    return "float8_e4m3fn" if scheme.element == "e4m3" else "float4_e2m1fn"


def open_checkpoint(path: Path) -> CheckpointCarrier:
    """Open a safetensors file or a folder of them; headers only.

    Example:
        >>> carrier = open_checkpoint(Path("samples/tiny-llama/checkpoint"))
        >>> [layer.name for layer in carrier.layers()][:2]
        ['lm_head', 'model.embed_tokens']

    Raises:
        SpecError: the path is missing, or holds no safetensors, or an adapter.
        ModelError: a file is cut or damaged, the files, the index and ``config.json`` disagree, the
            weights are quantized already, or all are stored as parts, as weight norm does.
    """
    check_no_adapter(path)
    source = with_single_experts(read_checkpoint(path))
    subject = f"checkpoint {str(path)!r}"
    headers = source.tensors
    _refuse_codes(headers, subject)
    if source.folder is not None:
        shapes = {name: tensor.shape for name, tensor in headers.items()}
        check_config(source.config, shapes, f"config {str(source.folder / CONFIG)!r}")
    tensors: dict[str, StoredTensor] = {}
    for shard in source.shards:
        file = MappedFile(shard.path, shard.nbytes)
        for header in shard.tensors.values():
            read: Callable[[], torch.Tensor] = FileTensor(file, header)
            tensors[header.name] = StoredTensor(
                header.name, header.shape, DTYPES[header.dtype], read
            )
    widen_float8(source, tensors, subject)
    layers = []
    for tensor in tensors.values():
        if tensor.dtype.is_floating_point:
            layer = layer_of(tensor.name, tensor.shape, numpy_name(tensor.dtype), source.config)
            layers += [] if layer is None else [layer]
    parts = [name for name in tensors if _PART.search(name)]
    if parts and not layers:
        raise ModelError(
            subject,
            f"holds weights as parts that the network computes them from, such as {parts[0]!r}",
            "save plain ones, after torch.nn.utils.parametrize.remove_parametrizations (or "
            "remove_weight_norm, remove_spectral_norm), or write a spec with model.factory",
        )
    return CheckpointCarrier(source, tensors, layers)


def _refuse_codes(headers: Mapping[str, TensorHeader], subject: str) -> None:
    for tensor in headers.values():
        multiplied = tensor.dtype == "I8" and f"{tensor.name}_scale" in headers
        if multiplied or tensor.dtype not in DTYPES or _CODES.fullmatch(tensor.name):
            raise ModelError(
                subject,
                f"is already quantized: {tensor.name!r} belongs to a quantized weight",
                "give the checkpoint in floating point, or in float8 with scales",
            )
