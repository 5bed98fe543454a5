"""How much of the noise in a model's outputs its metric feels.

Noise that the metric does not look at, such as that of an output that it does not read, or of
answers that are far from any other, costs nothing. So layers are ranked by what the metric feels:

- Metrics about classes (accuracy, agreement, top5, perplexity) by the Kullback-Leibler divergence
  of the answers' probabilities (as in ZeroQ, Cai et al. 2020). It is small where the float model is
  sure of its answer, and for small noise it grows as the noise's power does, so that what several
  layers add can be added up. The metric itself moves in steps, which few samples do not show.
- Other metrics by how much the value of each sample changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from compressor.run.metrics import Metric
from compressor.types.tensors import Array, Batch

FeltBy = Literal["divergence", "metric"]


@dataclass(frozen=True)
class Feeling:
    """What a metric feels.

    Attributes:
        targets: of the samples that noise is measured on, ``[N, ...]``; ``None`` where the float
            model's outputs are the target.
    """

    metric: Metric
    targets: Array | None

    @property
    def by(self) -> FeltBy:
        """What is added up."""
        return "divergence" if self.metric.about_classes else "metric"

    def felt(self, exact: Batch, noisy: Batch, first: int = 0) -> float:
        """Return what the metric feels of noise, summed over samples.

        Args:
            exact: the float model's outputs for some samples.
            noisy: the same with noise.
            first: number of the first of these samples.
        """
        if self.metric.about_classes:
            pairs = zip(next(iter(exact.values())), next(iter(noisy.values())), strict=True)
            return sum(_divergence(one, other) for one, other in pairs)
        size = len(next(iter(exact.values())))
        target: object = exact
        if self.targets is not None:
            target = self.targets.take(range(first, first + size), axis=0, mode="wrap")
        values = [self.metric.per_sample(outputs, target, size) for outputs in (exact, noisy)]
        return float(np.abs(values[1] - values[0]).sum())


def _divergence(exact: Array, noisy: Array) -> float:
    """Return the mean divergence of one sample's answers, in nats; logits ``[..., classes]``."""
    first, second = _log_softmax(exact), _log_softmax(noisy)
    return max(0.0, float((np.exp(first) * (first - second)).sum(axis=-1).mean()))


def _log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
