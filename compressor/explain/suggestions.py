"""Choose what to suggest, and predict what it would bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressor.explain.explanation import Gain, LayerCost

_HALF = 0.5


def best(layers: Sequence[LayerCost], count: int) -> list[LayerCost]:
    """Return the layers whose change brings most for its bytes.

    First those that improve the metric beyond chance, by their gain for each byte; then those
    that remove more than half of what a layer's change removes on average, by the share of the
    noise that goes for each byte.

    Args:
        layers: what is known of each.
        count: how many at most.
    """
    shares = [max(cost.gain.noise_share or 0.0, 0.0) for cost in layers]
    even = sum(shares) / max(len(shares), 1)
    certain = [cost for cost in layers if cost.gain.certain]
    certain.sort(key=lambda cost: -(cost.gain.metric or 0.0) / _bytes(cost))
    noisy = [
        cost
        for cost in layers
        if not cost.gain.certain
        and cost.gain.noise_share is not None
        and cost.gain.noise_share > _HALF * even
        and not (cost.gain.ci95 is not None and cost.gain.ci95[1] < 0)
    ]
    noisy.sort(key=lambda cost: -(cost.gain.noise_share or 0.0) / _bytes(cost))
    return [*certain, *noisy][:count]


def _bytes(cost: LayerCost) -> int:
    return max(cost.gain.bytes, 1)


def together(gains: Sequence[Gain]) -> Gain:
    """Return the gain of several changes, if each removes noise of its own.

    The powers of independent noises add, and so do the shares that go. Of the metric, only gains
    beyond chance are added; that is a guess, and no interval is given for it.
    """
    shares = [gain.noise_share for gain in gains if gain.noise_share is not None]
    share = sum(shares) if shares else None
    metrics = [gain.metric for gain in gains if gain.certain and gain.metric is not None]
    known = share is not None and any(gain.sqnr_db is not None for gain in gains)
    return Gain(
        bytes=sum(gain.bytes for gain in gains),
        sqnr_db=gained_db(share) if known and share is not None else None,
        noise_share=None if share is None else min(share, 100.0),
        metric=sum(metrics) if metrics else None,
    )


def gained_db(share: float) -> float | None:
    """Return by how many dB signal to noise rises if so much of the noise goes, in percent.

    ``None`` where all would go.
    """
    return -10.0 * math.log10(1.0 - share / 100.0) if share < 100.0 else None


def share_of(gain_db: float) -> float:
    """Invert :func:`gained_db`; negative where noise was added."""
    return float(100.0 * (1.0 - 10.0 ** (-gain_db / 10.0)))
