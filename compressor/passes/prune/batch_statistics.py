"""Running statistics of batch normalizations, estimated anew on data.

A smaller model's activations have other means and variances than those that training recorded.
Each normalization is written out with the statistics of the batch at hand, as in training, and the
batches' statistics are pooled. So what a layer sees during estimation is what it will see later,
also behind other normalizations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import DataError
from compressor.graph.editing import Editor
from compressor.graph.values import is_op
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch

_EPSILON = 1e-5  # ONNX's default


@dataclass
class PooledMoments:
    """Mean and variance over several batches, from those of each.

    The variance of everything is the mean of the batches' variances plus the variance of their
    means.
    """

    samples: int = 0
    first: Array = field(default_factory=lambda: np.zeros(1))
    second: Array = field(default_factory=lambda: np.zeros(1))

    def add(self, samples: int, mean: Array, variance: Array) -> None:
        """Take in a batch.

        Args:
            samples: how many it has; its weight.
            mean: of each channel.
            variance: around that mean, of the population.
        """
        mean, variance = mean.astype(np.float64), variance.astype(np.float64)
        self.samples += samples
        self.first = self.first + samples * mean
        self.second = self.second + samples * (variance + mean * mean)

    def pooled(self) -> tuple[Array, Array]:
        """Return mean and variance of all samples."""
        mean = self.first / self.samples
        return mean, np.maximum(self.second / self.samples - mean * mean, 0.0)


def batch_norms(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the batch normalizations of the main graph whose statistics are parameters."""
    for node in model.graph:
        if is_op(node, "BatchNormalization") and len(node.outputs) == 1:
            value, mean, variance = node.inputs[0], node.inputs[3], node.inputs[4]
            known = value is not None and value.shape is not None
            held = all(v is not None and v.is_initializer() for v in (mean, variance))
            if known and held:
                yield node


def re_estimated(carrier: Carrier, batches: Iterable[Batch]) -> Carrier:
    """Return the model with running statistics of the data.

    Args:
        carrier: it offers run and graph, and has batch normalizations.
        batches: the calibration data. Batches weigh by their samples.

    Raises:
        DataError: there are no samples, or a statistic is not finite.
    """
    graph = carrier.graph().clone()
    editor = Editor(graph)
    taps = [_written_out(editor, node) for node in list(batch_norms(graph))]
    runner = carrier.with_graph(graph).runner([t for tap in taps for t in tap[2:]])
    pooled: dict[tuple[str, str], PooledMoments] = {}
    for batch in batches:
        outputs = runner.run(batch)
        samples = len(next(iter(batch.values())))
        for mean_name, variance_name, mean, variance in taps:
            # A normalization that is used twice has one pair of statistics.
            moments = pooled.setdefault((mean_name, variance_name), PooledMoments())
            moments.add(samples, outputs[mean].ravel(), outputs[variance].ravel())
    if not pooled:
        raise DataError("calibration data", "has no samples", "give at least one batch")
    initializers = carrier.graph().graph.initializers
    changes: dict[str, torch.Tensor] = {}
    for names, moments in pooled.items():
        for name, array in zip(names, moments.pooled(), strict=True):
            if not np.isfinite(array).all():
                raise DataError(
                    f"statistic {name!r}",
                    "is not finite on the calibration data",
                    "look for NaN and very large values in the data",
                )
            dtype = initializers[name].dtype
            assert dtype is not None
            changes[name] = torch.from_numpy(array.astype(dtype.numpy()))
    return carrier.with_weights(changes)


def _written_out(editor: Editor, node: ir.Node) -> tuple[str, str, str, str]:
    """Replace a normalization by one with the batch's own statistics.

    Returns:
        The names of its mean and variance, and of the values that are the batch's.
    """
    value, scale, shift, mean, variance = node.inputs[:5]
    assert value is not None
    assert value.shape is not None
    assert mean is not None
    assert variance is not None
    edit = _Insertion(editor, node, value.dtype)
    rank = len(value.shape)
    axes = edit.constant("axes", np.array([0, *range(2, rank)], np.int64))
    column = edit.constant("column", np.array([1, -1, *[1] * (rank - 2)], np.int64))
    epsilon = node.attributes.get_float("epsilon", _EPSILON)
    dtype = np.float32 if value.dtype is None else value.dtype.numpy()
    own_mean = edit.put("ReduceMean", value, axes)
    centred = edit.put("Sub", value, own_mean)
    own_variance = edit.put("ReduceMean", edit.put("Mul", centred, centred), axes)
    shifted = edit.put("Add", own_variance, edit.constant("epsilon", np.array(epsilon, dtype)))
    unit = edit.put("Div", centred, edit.put("Sqrt", shifted))
    scaled = edit.put("Mul", unit, edit.put("Reshape", scale, column))
    result = edit.put("Add", scaled, edit.put("Reshape", shift, column))
    ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
    editor.model.graph.remove(node, safe=True)
    names = (mean.name, variance.name, own_mean.name, own_variance.name)
    return names[0] or "", names[1] or "", names[2] or "", names[3] or ""


@dataclass
class _Insertion:
    """Puts nodes in front of one."""

    editor: Editor
    before: ir.Node
    dtype: ir.DataType | None

    def constant(self, name: str, array: Array) -> ir.Value:
        return self.editor.constant(f"{self.before.outputs[0].name}_{name}", array)

    def put(self, op_type: str, *inputs: ir.Value | None) -> ir.Value:
        name = f"{self.before.outputs[0].name}_{op_type}"
        node = self.editor.node(op_type, inputs, name, self.dtype)
        self.before.graph.insert_before(self.before, node)  # type: ignore[union-attr]  # it is in one
        return node.outputs[0]


def has_batch_norms(model: ir.Model) -> bool:
    """Tell whether there is anything to estimate."""
    return any(True for _ in batch_norms(model))
