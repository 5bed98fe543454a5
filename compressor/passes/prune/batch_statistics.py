"""Running statistics of batch normalizations, re-estimated on calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import DataError, SpecError
from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.models.element_types import of_numpy
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, samples_in

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
        if operator(node).running_statistics and len(node.outputs) == 1:
            value, mean, variance = node.inputs[0], node.inputs[3], node.inputs[4]
            shaped = value is not None and value.shape is not None
            held = all(v is not None and v.is_initializer() for v in (mean, variance))
            if shaped and held:
                yield node


def check_normalized(model: ir.Model) -> None:
    """Check that a model has statistics that ``re-estimate`` can measure.

    Raises:
        SpecError: it has none.
    """
    if next(batch_norms(model), None) is None:
        raise SpecError(
            "re-estimate",
            "is true, but the model has no batch normalization",
            "remove it, or put this pass before fuse",
        )


def with_batch_statistics(model: ir.Model) -> ir.Model:
    """Return a copy that normalizes each batch by its own statistics."""
    copy = model.clone()
    editor = Editor(copy)
    for node in list(batch_norms(copy)):
        _written_out(editor, node)
    return copy


def re_estimated(
    carrier: Carrier, batches: Iterable[Batch], data: str = "calibration data"
) -> Carrier:
    """Return the model with running statistics of the data; batches weigh by their samples.

    Messages call them ``data``.

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
        samples = samples_in(batch)
        for mean_name, variance_name, mean, variance in taps:
            # A normalization that is used twice has one pair of statistics.
            moments = pooled.setdefault((mean_name, variance_name), PooledMoments())
            moments.add(samples, outputs[mean].ravel(), outputs[variance].ravel())
    if not pooled:
        raise DataError(data, "has no samples", "give at least one batch")
    initializers = carrier.graph().graph.initializers
    changes: dict[str, torch.Tensor] = {}
    for names, moments in pooled.items():
        for name, array in zip(names, moments.pooled(), strict=True):
            if not np.isfinite(array).all():
                raise DataError(
                    f"statistic {name!r}",
                    f"is not finite on the {data}",
                    "look for NaN and very large values in the data",
                )
            dtype = initializers[name].dtype
            assert dtype is not None
            changes[name] = of_numpy(array.astype(dtype.numpy()))
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
    name, kind, rank = node.outputs[0].name, value.dtype, len(value.shape)

    def put(op_type: str, *inputs: ir.Value | None) -> ir.Value:
        made = editor.node(op_type, inputs, f"{name}_{op_type}", kind)
        node.prepend(made)
        return made.outputs[0]

    axes = editor.constant(f"{name}_axes", np.array([0, *range(2, rank)], np.int64))
    column = editor.constant(f"{name}_column", np.array([1, -1, *[1] * (rank - 2)], np.int64))
    epsilon = node.attributes.get_float("epsilon", _EPSILON)
    dtype = np.float32 if kind is None else kind.numpy()
    batch_mean = put("ReduceMean", value, axes)
    centred = put("Sub", value, batch_mean)
    batch_variance = put("ReduceMean", put("Mul", centred, centred), axes)
    least = editor.constant(f"{name}_epsilon", np.array(epsilon, dtype))
    unit = put("Div", centred, put("Sqrt", put("Add", batch_variance, least)))
    scaled = put("Mul", unit, put("Reshape", scale, column))
    result = put("Add", scaled, put("Reshape", shift, column))
    ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
    editor.model.graph.remove(node, safe=True)
    names = (mean.name, variance.name, batch_mean.name, batch_variance.name)
    return names[0] or "", names[1] or "", names[2] or "", names[3] or ""
