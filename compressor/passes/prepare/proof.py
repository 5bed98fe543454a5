"""Prove that a model computes what it did before its channels were scaled."""

from __future__ import annotations

from dataclasses import replace

from compressor.passes.prepare.balance import Balance, scaled_weights
from compressor.types.carrier import Carrier
from compressor.types.data import Samples
from compressor.types.tensors import worst_difference

_SAMPLES = 2
_MAGNIFIED = 10.0
"""How much more than rounding alone, which the network magnifies, scaling may change outputs."""


def proved(carrier: Carrier, scaled: Balance, samples: Samples | None) -> tuple[Carrier, Balance]:
    """Scale a model's channels, unless its outputs change by more than rounding.

    Where a network magnifies rounding to more than the limit, the same weights scaled there and
    back say how much it does.

    Args:
        carrier: the model; it is not modified.
        scaled: what is to be scaled in it.
        samples: the model is run on the first of them, if there are any.

    Returns:
        The model, and what was scaled: nothing, with a note that says why, if outputs change.
    """
    if not scaled.groups:
        return carrier, scaled
    after = scaled.applied(carrier)
    if samples is None:
        return after, scaled
    batch = samples.probe(_SAMPLES)
    wanted = carrier.runner().run(batch)
    error, limit = worst_difference(wanted, after.runner().run(batch))
    if error > limit:
        rounded = _back(carrier, scaled).runner().run(batch)
        limit = max(limit, _MAGNIFIED * worst_difference(wanted, rounded)[0])
    if error <= limit:
        return after, scaled
    note = (
        f"nothing was scaled: outputs would differ by {error:.1e} of the largest, and the limit is "
        f"{limit:.0e}; report it with the model"
    )
    return carrier, Balance({}, (), {}, note)


def _back(carrier: Carrier, scaled: Balance) -> Carrier:
    """Return the model with its weights scaled and scaled back."""
    there = carrier.with_weights(scaled.weights)
    back = [replace(one, factors=one.factors.reciprocal()) for one in scaled.groups]
    return there.with_weights(scaled_weights(there, back))
