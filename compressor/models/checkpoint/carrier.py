"""The carrier of bare checkpoints: named weights in safetensors files, without a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir
import torch

from compressor.errors import ModelError, SpecError
from compressor.files import json_sha256
from compressor.models.checkpoint.changed import FLOAT8, Float8Tensor, block_of, changed, scale_of
from compressor.models.checkpoint.config import check_config, layer_of
from compressor.models.checkpoint.folder import CONFIG, Checkpoint, read_checkpoint
from compressor.models.checkpoint.reading import FileTensor, MappedFile
from compressor.models.codec.headers import DTYPES, TensorHeader
from compressor.models.executor.dtypes import natural_type
from compressor.types.carrier import Capability, WeightChange
from compressor.types.channels import Units
from compressor.types.layers import Layer
from compressor.types.quantized import Scheme, WeightCodes
from compressor.types.tensors import StoredTensor, TensorSpec

# Tensors that stand for others whose codes they hold: the checkpoint is quantized already.
_CODES = re.compile(r".*\.(?:weight_packed|qweight|qzeros|g_idx|weight_global_scale|absmax)")
_UNSCALED = ("input_scale", "activation_scale")  # of activations, which are floats again
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CheckpointCarrier:
    """Named weights; what computes with them is not known.

    Float8 weights of layers appear as wider floats, their scales multiplied in.

    Args:
        source: the checkpoint's headers.
        tensors: its tensors, of which passes may have changed some.
        layers: its layers, in the order of storage.
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
    ):
        self.source = source
        self._tensors = dict(tensors)
        self._layers = tuple(layers)

    @property
    def path(self) -> Path:
        """What was opened."""
        return self.source.path

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

    @property
    def tied(self) -> bool:
        """Whether the output layer reads the table of embeddings, and is not stored itself."""
        return bool(self.config.get("tie_word_embeddings")) and not any(
            name.endswith("lm_head.weight") for name in self._tensors
        )

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
        given = {}
        for name, tensor in changes.items():
            if name not in self._tensors:
                raise KeyError(f"no tensor {name!r}")
            read = partial(_given, tensor.detach().contiguous())
            given[name] = StoredTensor(name, tuple(tensor.shape), tensor.dtype, read)
        layers = [
            replace(layer, shape=new.shape, dtype=numpy_name(new.dtype))
            if (new := given.get(layer.weight)) is not None
            else layer
            for layer in self._layers
        ]
        return CheckpointCarrier(self.source, {**self._tensors, **given}, layers)

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
        return CheckpointCarrier(self.source, tensors, self._layers)

    def with_codes(self, changes: Mapping[str, WeightCodes]) -> CheckpointCarrier:
        """Return a carrier with some float weights stored as codes, found when they are read.

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
        return CheckpointCarrier(self.source, tensors, layers)

    def graph(self) -> ir.Model:
        """Raise ``SpecError``: there is no graph."""
        _weights_only("graph")

    def with_graph(self, graph: ir.Model) -> NoReturn:  # noqa: ARG002
        """Raise ``SpecError``: there is no graph."""
        _weights_only("graph")

    def with_channels(
        self,
        graph: ir.Model,  # noqa: ARG002
        kept: Mapping[str, Mapping[int, Units]],  # noqa: ARG002
        *,
        planned: bool = False,  # noqa: ARG002
    ) -> NoReturn:
        """Raise ``SpecError``: there is no graph."""
        _weights_only("graph")

    def trainable(self) -> NoReturn:
        """Raise ``SpecError``: there is no module."""
        _weights_only("training")

    def with_trainable_graph(
        self,
        graph: ir.Model,  # noqa: ARG002
        parameters: Collection[str],  # noqa: ARG002
        *,
        planned: bool = False,  # noqa: ARG002
    ) -> NoReturn:
        """Raise ``SpecError``: there is no graph."""
        _weights_only("graph")

    def runner(self, taps: Sequence[str] = ()) -> NoReturn:  # noqa: ARG002
        """Raise ``SpecError``: it cannot be run."""
        _weights_only("run")

    def save(self, directory: Path) -> None:
        """Write nothing: what passes do to a bare checkpoint are recipes, not tensors."""

    def restore(self, directory: Path) -> CheckpointCarrier:  # noqa: ARG002
        """Return this carrier."""
        return self

    def digest(self) -> str:
        """Return a key of the checkpoint that is found without reading its data.

        It changes with the names, sizes and times of its files, their headers, and its
        configuration.
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
        return json_sha256([shards, dict(self.config)])


def _given(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _weights_only(what: str) -> NoReturn:
    raise SpecError(
        f"the model's {what}",
        "a bare checkpoint offers weights only",
        "give model.factory (for example transformers.AutoModelForCausalLM)",
    )


def numpy_name(dtype: torch.dtype) -> str:
    """Return what numpy (with ``ml_dtypes``) calls a torch dtype."""
    return natural_type(dtype).numpy().name


def code_name(scheme: Scheme) -> str:
    """Return what numpy (with ``ml_dtypes``) calls the codes of a scheme."""
    if scheme.element == "int":
        return f"{'int' if scheme.signed else 'uint'}{scheme.bits}"
    return "float8_e4m3fn" if scheme.element == "e4m3" else "float4_e2m1fn"


def open_checkpoint(path: Path) -> CheckpointCarrier:
    """Open a safetensors file or a folder of them; headers only.

    Raises:
        SpecError: the path is missing, or holds no safetensors.
        ModelError: a file is cut or damaged, the files, the index and ``config.json`` disagree, or
            the weights are quantized already.
    """
    source = read_checkpoint(path)
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
    _widen(source, tensors, subject)
    layers = []
    for tensor in tensors.values():
        if tensor.dtype.is_floating_point:
            layer = layer_of(tensor.name, tensor.shape, numpy_name(tensor.dtype), source.config)
            layers += [] if layer is None else [layer]
    return CheckpointCarrier(source, tensors, layers)


def _refuse_codes(headers: Mapping[str, TensorHeader], subject: str) -> None:
    found = next(
        (t for t in headers.values() if t.dtype not in DTYPES or _CODES.fullmatch(t.name)), None
    )
    if found is not None:
        raise ModelError(
            subject,
            f"is quantized already: {found.name!r} holds codes or belongs to some",
            "give the checkpoint in floating point, or in float8 with scales",
        )


def _widen(source: Checkpoint, tensors: dict[str, StoredTensor], subject: str) -> None:
    """Replace float8 matrices by readers of wider floats, and drop their scales."""
    headers = source.tensors
    dtype = _float_of(source.config)
    for name, header in headers.items():
        if header.dtype not in FLOAT8 or len(header.shape) != 2 or not name.endswith(".weight"):
            continue
        scale = scale_of(name, headers)
        block = block_of(header, scale, _declared_block(source.config), subject)
        codes = tensors[name].read
        scales = None if scale is None else tensors.pop(scale.name).read
        assert isinstance(codes, FileTensor)
        assert scales is None or isinstance(scales, FileTensor)
        for suffix in _UNSCALED:
            tensors.pop(f"{name.removesuffix('weight')}{suffix}", None)
        read = Float8Tensor(codes, scales, block, dtype)
        tensors[name] = StoredTensor(name, header.shape, dtype, read)


def _float_of(config: Mapping[str, Any]) -> torch.dtype:
    named = config.get("dtype", config.get("torch_dtype"))
    return _FLOATS.get(str(named), torch.bfloat16)


def _declared_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    found = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if not isinstance(found, list) or len(found) != 2:
        return None
    height, width = found
    usable = type(height) is int and type(width) is int and height > 0 and width > 0
    return (height, width) if usable else None
