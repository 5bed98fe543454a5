"""Experts: a file holds those of a block in three tensors, one expert after another.

A checkpoint holds the layers of each expert. One that ``transformers`` wrote as it has them in
memory, and a network in memory, hold two tensors of all experts of a block: ``gate_up_proj
[experts, 2 * inner, hidden]``, whose rows are the gate's and then the others', and ``down_proj
[experts, hidden, inner]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from compressor.errors import ModelError, listed
from compressor.types.layers import StoredTensor

_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+\.weight)")
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_AXES = 3


def stack_parts(name: str) -> tuple[str, ...]:
    """Return what a file has in place of two tensors of all experts, or of another tensor.

    >>> stack_parts("model.layers.0.mlp.experts.gate_up_proj")
    ('model.layers.0.mlp.experts.gate_proj.weight', 'model.layers.0.mlp.experts.up_proj.weight')
    >>> stack_parts("model.norm.weight")
    ('model.norm.weight',)
    """
    found = _STACK.fullmatch(name)
    if found is None:
        return (name,)
    return tuple(f"{found[1]}.{part}.weight" for part in _PARTS[found[2]])


def experts_together(
    tensors: Mapping[str, StoredTensor], count: int
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return what each tensor of a file is made of, by its name without the expert's number.

    Args:
        tensors: of the checkpoint, by name.
        count: experts of a block; 0 where there are none.

    Returns:
        The matrices of all experts in order, ``[rows, columns]`` each; one tensor elsewhere.

    Raises:
        ModelError: a block misses an expert, or has more than there are.
    """
    if not count:
        return {name: (tensor,) for name, tensor in tensors.items()}
    result: dict[str, tuple[StoredTensor, ...]] = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _SINGLE.fullmatch(name)
        if found is not None:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        elif _STACK.fullmatch(name) and len(tensor.shape) == _AXES:
            parts = stack_parts(name)
            for number, part in enumerate(parts):
                experts[part] = dict(enumerate(_views(tensor, number, len(parts))))
        else:
            result[name] = (tensor,)
    for name, each in experts.items():
        odd = sorted(each.keys() ^ set(range(count)))
        if odd:
            what = "misses" if odd[0] < count else "has too many experts:"
            raise ModelError(
                f"{name!r} of experts",
                f"{what} {listed([str(number) for number in odd])} of {count}",
                "a shard is missing, or config.json belongs to another model",
            )
        result[name] = tuple(each[number] for number in range(count))
    return result


def _views(stack: StoredTensor, part: int, parts: int) -> Iterator[StoredTensor]:
    """Yield the matrix of each expert in a stack, a view of it when it is read."""
    experts, rows, columns = stack.shape
    for expert in range(experts):
        read = partial(_view, stack, expert, part, parts)
        yield StoredTensor(f"{stack.name}[{expert}]", (rows // parts, columns), stack.dtype, read)


def _view(stack: StoredTensor, expert: int, part: int, parts: int) -> torch.Tensor:
    return stack.read()[expert].chunk(parts)[part]
