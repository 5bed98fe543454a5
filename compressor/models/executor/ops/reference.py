"""Rare operators, and rare forms of others, that ONNX's reference implementation runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.models.element_types import from_numpy, to_numpy
from compressor.models.executor.node import Node, Operator, Read, Table
from compressor.models.executor.program import Result

_Evaluate: TypeAlias = "Callable[..., tuple[Tensor, ...]]"


def _evaluator(node: Node, _: str) -> _Evaluate:
    """Return a function that evaluates the node alone, on NumPy arrays."""
    from onnx.reference import ReferenceEvaluator

    function = node.alone()
    try:
        evaluator = ReferenceEvaluator(function)
    except (RuntimeError, ValueError, TypeError) as error:
        raise node.refuse(f"ONNX's reference implementation does not run it: {error}") from error

    def run(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        given = [x.detach().cpu() for x in inputs if x is not None]
        arrays = {name: to_numpy(x) for name, x in zip(function.input, given, strict=True)}
        with np.errstate(all="ignore"):
            outputs: Any = evaluator.run(None, arrays, attributes={})
        return tuple(from_numpy(ir.tensor(array)) for array in outputs)

    return run


_EVALUATOR: Any = Read(_evaluator)


def _evaluated(*inputs: Tensor | None, evaluate: _Evaluate = _EVALUATOR) -> Result:
    """Evaluate on the CPU, and bring the results to where the inputs are.

    Raises:
        ValueError: a gradient would be lost.
    """
    results = evaluate(*inputs)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if trained and any(result.is_floating_point() for result in results):
        raise ValueError("it has no gradient; keep it out of what is trained")
    device = next((x.device for x in inputs if x is not None and not x.is_cpu), None)
    return results if device is None else tuple(result.to(device) for result in results)


def _one_hot(
    indices: Tensor, depth: Tensor, values: Tensor, *, evaluate: _Evaluate = _EVALUATOR
) -> Result:
    """Evaluate with a number as depth, which may also be a tensor of one element."""
    return _evaluated(indices, depth.reshape(()), values, evaluate=evaluate)


BY_REFERENCE = Operator(_evaluated)
"""Runs a node of any standard operator, slowly and without gradients."""

REFERENCE: Table = dict.fromkeys(
    (
        "BitShift",
        "BlackmanWindow",
        "Col2Im",
        "EyeLike",
        "HammingWindow",
        "HannWindow",
        "STFT",
        "Shrink",
    ),
    BY_REFERENCE,
) | {"OneHot": Operator(_one_hot)}
