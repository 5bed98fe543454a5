"""What a metric is given: the outputs that it is about, and what they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from compressor.graph.output_parts import OutputParts, output_parts
from compressor.run.data import Data
from compressor.run.metrics import Metric
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import Array, Batch, Feed, answers, samples_in


def judged_parts(carrier: Carrier, data: Data) -> OutputParts:
    """Return what a model's outputs are joined of; nothing where its graph is not known, or a
    sample is a whole run, whose outputs have no axis of samples."""
    known = not data.feeds and data.recurrence is None and Capability.GRAPH in carrier.offers
    return output_parts(carrier.graph()) if known else ()


def judged_outputs(batch: Batch, outputs: Batch, metric: Metric) -> Batch:
    """Return the outputs that a metric is about, with samples as first axis.

    The user's own metric gets all outputs; of a feed, as the model gives them. For a metric of
    tokens, those that the attention mask leaves out are zeros.

    Raises:
        DataError: no output has an axis of samples.
    """
    if metric.code is not None:
        return outputs
    if isinstance(batch, Feed):
        outputs = {name: array[None] for name, array in outputs.items()}
    sampled = metric.sampled(outputs, samples_in(batch))
    return {n: _unmasked(batch, a) for n, a in sampled.items()} if metric.of_tokens else sampled


def _unmasked(batch: Batch, output: Array) -> Array:
    """Return an output ``[N, tokens, ...]`` with zeros in place of tokens that are masked.

    The mask is an array ``[N, tokens]`` of the batch with ``mask`` in its name; without one, the
    output is as it is.
    """
    for name, mask in batch.items():
        if "mask" in name and mask.ndim == 2 < output.ndim and mask.shape == output.shape[:2]:
            kept = (mask != 0).reshape(*mask.shape, *[1] * (output.ndim - 2))
            return np.asarray(np.where(kept, output, 0))
    return output


def target_of(batch: Batch, label: str | None, expected: Batch, metric: Metric) -> Any:
    """Return what a metric compares with: labels, or the float model's outputs.

    Args:
        label: name of the array with the labels, if there is one.
        expected: the float model's judged outputs.
    """
    if label is None or metric.against_float:
        return expected
    whole = isinstance(batch, Feed) and metric.code is None
    return batch[label][None] if whole else answers(batch, label)
