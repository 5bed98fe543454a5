"""A module that a program made, and not a factory: a copy for the run, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import check_finite, held_tensors
from compressor.models.torch.saved_module import without_weights
from compressor.types.tensors import TensorSpec

_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def open_program_module(module: nn.Module, inputs: Sequence[TensorSpec], key: str) -> TorchCarrier:
    """Return a carrier of a copy of a module, which shares parameters in the host's memory.

    Args:
        key: where the module stands in the spec, for messages.

    Raises:
        SpecError: it cannot be copied, or its inputs are not known.
        ModelError: a weight is NaN or infinite.
    """
    if not inputs:
        raise SpecError(
            "model.inputs",
            "is empty, a module does not know its own inputs",
            "give data from which they show, or inputs such as "
            "{'image': {'shape': ['batch', 3, 32, 32]}}",
        )
    held = held_tensors(module)
    check_finite(held.items(), f"module {type(module).__name__}", dict(module.named_buffers()))
    # A forward may write buffers. What it computed is no leaf, which deepcopy refuses: outputs that
    # it keeps, and weights by hooks, such as those of torch.nn.utils.prune.
    kept = [t for part in module.modules() for t in vars(part).values() if _is_computed(t)]
    memo = {id(t): _on_host(t.detach()).clone() for t in (*kept, *module.buffers())}
    memo |= {id(tensor): _on_host(tensor) for tensor in module.parameters()}
    try:
        copy = deepcopy(module, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise SpecError(
            key, f"cannot be copied ({error})", "give a factory that builds it, and a checkpoint"
        ) from error
    return TorchCarrier(copy, inputs)


def _is_computed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    moved = tensor.detach().cpu()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _content_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield names, types, shapes and elements of tensors, by name, for a hash."""
    for name, tensor in sorted(tensors.items()):
        value = tensor.detach().contiguous()
        yield f"{name} {value.dtype} {tuple(value.shape)}".encode()
        yield value.reshape(-1).view(torch.uint8).numpy().data


def content_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a SHA-256 of tensors: of names, types, shapes and elements."""
    digest = hashlib.sha256()
    for part in _content_of(tensors):
        digest.update(part)
    return digest.hexdigest()


def settings_digest(module: nn.Module) -> str:
    """Return a SHA-256 of what submodules hold beside parameters and buffers, as far as is plain.

    These are numbers, texts and tensors, and collections of them, which ``forward`` may use.
    """
    digest = hashlib.sha256()
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if key not in _OF_ALL_MODULES:
                digest.update(f"{name}.{key}".encode())
                for piece in _plain_content(value):
                    digest.update(piece)
    return digest.hexdigest()


def _plain_content(value: object) -> Iterator[bytes]:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, list | tuple | set | frozenset | dict):
        items = value.items() if isinstance(value, dict) else value
        pieces = [b"".join(_plain_content(item)) for item in items]
        yield b"%d" % len(pieces)
        yield from sorted(pieces) if isinstance(value, set | frozenset) else pieces
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, torch.Tensor) and not value.is_meta:
        yield from map(bytes, _content_of({"": value.cpu()}))


def program_module_digest(carrier: TorchCarrier) -> str:
    """Return a SHA-256 of a module: its structure, its weights, and the graph that it computes.

    The graph holds what neither structure nor weights show, such as numbers in its ``forward``.

    Raises:
        ModelError: it cannot be lowered to a graph.
    """
    digest = hashlib.sha256(str(carrier.module).encode())
    digest.update(content_digest(held_tensors(carrier.module)).encode())
    graph = without_weights(carrier.lowered, carrier.module)
    for node in (*graph.graph, *(n for f in graph.functions.values() for n in f)):
        node.metadata_props.clear()  # where in the program's files it comes from
    digest.update(ir.to_proto(graph).SerializeToString(deterministic=True))
    return digest.hexdigest()
