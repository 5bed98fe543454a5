"""Sizes that forward makes Python numbers of, which an exported graph then holds.

``torch.linspace``, windows and NumPy take a size as a number. Of an axis itself PyTorch's exporter
says so; of what is computed from one, as behind a stride, it notes that the two are equal, and the
graph fits inputs of the example's size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compressor.errors import ModelError, listed
from compressor.types.tensors import TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FAR = lcm(*range(1, 1025)) ** 2  # positions further, what holds of multiples still holds

NUMBERS = (
    "give the axis its number in model.inputs, or let forward make no number of that size, as a "
    "loop, torch.linspace, windows and NumPy do (torch.arange takes it as it is)"
)
"""What to do where a size is fixed."""


def check_sizes(
    module: nn.Module,
    program: ExportedProgram | None,
    inputs: Sequence[TensorSpec],
    example: Mapping[str, torch.Tensor],
) -> None:
    """Check that no size that dynamic axes decide about is that of the example.

    Args:
        program: what the module was exported to.
        example: what it was exported with, in which all dynamic axes differ in length.

    Raises:
        ModelError: one is.
    """
    axes = {
        length: axis
        for spec in inputs
        for axis, length in zip(spec.shape, example[spec.name].shape, strict=True)
        if isinstance(axis, str)
    }
    for lengths, number in () if program is None else _fixed(program):
        names = [axes[length] for length in lengths if length in axes]
        if names:
            raise ModelError(
                f"module {type(module).__name__}",
                f"has a size that follows from {listed(names)} of model.inputs built into its "
                f"graph, as {number}",
                NUMBERS,
            )


def _fixed(program: ExportedProgram) -> Iterator[tuple[list[int], int]]:
    """Yield the lengths of axes that a size follows from, and the number that it has to be."""
    import sympy

    hints: dict[Any, int] = {}
    environment: Any = None
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for size in shape:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                hints[size.node.expr] = size.node.hint
                environment = size.node.shape_env
    for fact, holds in () if environment is None else environment.axioms.items():
        if holds is not sympy.true or not isinstance(fact, sympy.Eq):
            continue
        size, number = fact.args
        if number.is_Integer and size.free_symbols <= hints.keys():
            lengths = dict.fromkeys(hints[symbol] for symbol in size.free_symbols)
            fixed = [length for length in lengths if not _elsewhere(size, number, hints, length)]
            if fixed:
                yield fixed, int(number)


def _elsewhere(size: Any, number: Any, hints: Mapping[Any, int], length: int) -> bool:
    """Whether a size is a number too where the axis of one length, of all inputs, has another."""
    import sympy

    # Far above, or well below, where a fact says that a length has a bound.
    for other in (length + _FAR, *(max(1, length // part) for part in (length, 4, 2))):
        lengths = {s: sympy.Integer(other if n == length else n) for s, n in hints.items()}
        try:
            if size.xreplace(lengths) == number and other != length:
                return True
        except ZeroDivisionError:  # no tensor has this length
            continue
    return False
