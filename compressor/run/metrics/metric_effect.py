"""The effect of noise in a model's outputs on its metric.

Noise that does not change the metric, such as that of an output that it does not read, or of
answers far from a decision boundary, costs nothing. So layers are ranked by the effect on the
metric:

- Metrics about classes (accuracy, agreement, top5, perplexity, f1, token-accuracy) by the
  Kullback-Leibler divergence of the answers' probabilities (as in ZeroQ, Cai et al. 2020). It
  is small where the float model is sure of its answer, and for small noise it grows as the noise's
  power does, so that what several layers add can be added up. The metric itself moves in steps,
  which few samples do not show.
- Other metrics by how much the value of each sample changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compressor.run.metrics.class_metrics import log_softmax
from compressor.run.metrics.metrics import Metric
from compressor.types.tensors import Array, Batch

EffectBasis = Literal["divergence", "metric"]
_MOST_LOGITS = 1 << 22  # a tenth of a second for each layer


@dataclass(frozen=True)
class MetricEffect:
    """How noise changes a metric.

    Attributes:
        targets: of the samples that noise is measured on, ``[N, ...]``, or several by name;
            ``None`` where the float model's outputs are the target.
    """

    metric: Metric
    targets: Array | Mapping[str, Array] | None

    @property
    def basis(self) -> EffectBasis:
        """The measure of the effect."""
        return "divergence" if self.metric.about_classes else "metric"

    def relative_to(self, exact: Batch, first: int = 0) -> Callable[[Batch], float]:
        """Return a function from noisy outputs to their effect on the metric, summed over samples.

        Args:
            exact: the float model's outputs for some samples.
            first: number of the first of these samples.
        """
        size = len(next(iter(exact.values())))
        if self.metric.about_classes:
            wanted = log_softmax(_decisions(exact))
            return lambda noisy: size * _divergence(wanted, log_softmax(_decisions(noisy)))
        target: object = exact
        rows = range(first, first + size)
        if isinstance(self.targets, Mapping):
            target = {n: a.take(rows, axis=0, mode="wrap") for n, a in self.targets.items()}
        elif self.targets is not None:
            target = self.targets.take(rows, axis=0, mode="wrap")
        values = self.metric.per_sample(exact, target, size)
        return lambda noisy: float(
            np.abs(self.metric.per_sample(noisy, target, size) - values).sum()
        )


def _decisions(outputs: Batch) -> Array:
    """Return the first output's logits, ``[decisions, classes]``, of very many some."""
    logits = next(iter(outputs.values()))
    rows = logits.reshape(-1, logits.shape[-1])
    return rows[:: -(-rows.size // _MOST_LOGITS)]


def _divergence(exact: Array, noisy: Array) -> float:
    """Return the mean divergence of answers, in nats, from logarithms of probabilities.

    Args:
        exact: ``[decisions, classes]``, as ``noisy``.
    """
    return max(0.0, float((np.exp(exact) * (exact - noisy)).sum(axis=1).mean()))
