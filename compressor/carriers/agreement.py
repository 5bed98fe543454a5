"""Whether a module computes what a graph does, tried on one small batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from compressor.carriers.calling import call
from compressor.carriers.lowering import example_inputs
from compressor.carriers.ort_runner import graph_runner
from compressor.types.tensors import Array, Batch, TensorSpec

_TOLERANCE = 1e-4  # of an output's largest value


def run_module(module: torch.nn.Module, inputs: Sequence[TensorSpec], batch: Batch) -> list[Array]:
    """Run a module; its output tensors in the order of the outputs of its graph."""
    tensors = {i.name: torch.from_numpy(batch[i.name]) for i in inputs}
    with torch.inference_mode():
        return [output.numpy() for output in call(module, tensors)]


def random_batch(inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Make a batch that most models take: normal floats, the ids 0 and 1, masks of ones.

    The same inputs always give the same batch.
    """
    rng = np.random.default_rng(0)
    batch: dict[str, Array] = {}
    for spec, example in zip(inputs, example_inputs(inputs).values(), strict=True):
        if example.is_floating_point():
            values: Array = rng.normal(size=tuple(example.shape))
        elif "mask" in spec.name:  # where everything is masked, nothing is computed
            values = np.ones(tuple(example.shape))
        else:
            values = rng.integers(0, 2, tuple(example.shape))
        batch[spec.name] = values.astype(spec.dtype)
    return batch


class Agreement:
    """Compares modules with a graph, which is run once, in ONNX Runtime.

    Args:
        graph: what is to be computed.
        inputs: the model's inputs.
    """

    def __init__(self, graph: ir.Model, inputs: Sequence[TensorSpec]):
        self._inputs = inputs
        self._batch = random_batch(inputs)
        self._wanted = list(graph_runner(graph).run(self._batch).values())

    def holds(self, module: torch.nn.Module) -> bool:
        """Tell whether the module's outputs are the graph's, within 1e-4 of the largest value."""
        try:
            found = run_module(module, self._inputs, self._batch)
        except Exception:  # noqa: BLE001  # the user's forward, with sizes it may not be made for
            return False
        return len(found) == len(self._wanted) and all(map(close, found, self._wanted))


def close(found: Array, wanted: Array) -> bool:
    """Tell whether an output is within 1e-4 of another's largest value."""
    if found.shape != wanted.shape:
        return False
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(found)):
        return False
    wide = wanted[finite].astype(np.float64)
    reach = float(np.abs(wide).max(initial=0.0))
    return bool(np.all(np.abs(found[finite] - wide) <= _TOLERANCE * reach))
