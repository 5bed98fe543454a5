"""How sparse a network is at a step of gradual pruning."""

from __future__ import annotations


def cubic_sparsity(step: int, begin: int, end: int, final: float, initial: float = 0.0) -> float:
    """Return the share of weights that are to be zero at a step of training.

    ``final + (initial - final) * (1 - t)^3``, with ``t`` growing from 0 at ``begin`` to 1 at
    ``end``: many weights go while there are plenty, few at the end. M. Zhu and S. Gupta, To prune,
    or not to prune, 2017 (arXiv:1710.01878), section 3.

    Args:
        step: the step, of which there may be some before ``begin`` and after ``end``.
        begin: the last step with the initial share.
        end: the first step with the final share.
        final: share of zeros at the end, 0 to 1.
        initial: share of zeros at the beginning, not above ``final``.

    Raises:
        ValueError: a share is out of range, the shares fall, or ``end`` lies before ``begin``.
    """
    if not 0 <= initial <= final <= 1:
        raise ValueError(f"shares {initial} and {final} do not rise within 0 to 1")
    if end < begin:
        raise ValueError(f"step {end} lies before step {begin}")
    if step >= end:
        return final
    if step <= begin:
        return initial
    left = 1 - (step - begin) / (end - begin)
    return final + (initial - final) * left**3
