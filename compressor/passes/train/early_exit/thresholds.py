"""How sure a head must be: thresholds chosen and checked on data, and what they bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb, floor, inf

import numpy as np
from numpy.typing import NDArray

from compressor.errors import DataError, ModelError
from compressor.passes.train.early_exit.heads import confidence_name
from compressor.passes.train.early_exit.points import ExitPoint
from compressor.types.carrier import Runner
from compressor.types.data import Samples
from compressor.types.tensors import Array, Batch, samples_in

_MOST_DIVISIONS = 1000  # of the samples that may differ among exits
_BELOW = 1e-4  # below the least confidence, relative to it, if all samples leave
_TOLERANCE = 1e-4  # of the largest answer; products of other sizes round differently
_FLAT = 1e-6  # of a feature's mean: what varies less does so by rounding
_LOWER = (99.9, 99.5, 99.0, 98.0, 97.0, 95.0, 90.0, 80.0, 50.0)  # agreements to suggest

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Thresholds:
    """The threshold of each exit, infinite if no sample leaves, and what they do to the samples.

    So many have left at each exit, and so many of those are wrong: they get another answer than the
    full network's. The cost is the mean of all samples.
    """

    values: tuple[float, ...]
    left: tuple[int, ...]
    wrong: tuple[int, ...]
    samples: int
    cost: float

    @property
    def agreement(self) -> float:
        """Percent of the samples that get the full network's answer."""
        return 100.0 * (1 - sum(self.wrong) / self.samples)

    @property
    def shares(self) -> tuple[float, ...]:
        """Percent of the samples that leave at each exit, and of those that go all the way."""
        left = (*self.left, self.samples - sum(self.left))
        return tuple(100.0 * count / self.samples for count in left)


def choose_thresholds(
    confidences: Array, agrees: Flags, agreement: float, costs: Sequence[float]
) -> Thresholds:
    """Find the thresholds with which samples cost least, for a required agreement.

    A sample leaves at the first exit whose confidence is at least the threshold. The samples that
    may get another answer are divided among the exits, and each exit takes the lowest threshold
    that needs no more than its part. All divisions are tried, in coarser steps if there are more
    than a thousand. For a division, that is the best choice: a sample that leaves earlier with the
    same answer costs less and takes nothing from later exits.

    Args:
        confidences: ``[exits, samples]``.
        agrees: whether the head's answer is the full network's, likewise.
        agreement: required percentage of samples with the full network's answer.
        costs: of the parts of the network: up to and with the first exit, from there to the
            second, ..., and after the last.

    Raises:
        ValueError: there are no samples, or the arrays do not fit each other.
    """
    exits, samples = confidences.shape
    if agrees.shape != confidences.shape or len(costs) != exits + 1 or not samples:
        raise ValueError(f"{agrees.shape} and {len(costs)} costs for {confidences.shape}")
    budget = floor(samples * (1 - agreement / 100) + 1e-9)
    step, sure = 1, confidences.astype(np.float32)
    while comb(budget // step + exits - 1, exits - 1) > _MOST_DIVISIONS:
        step += 1
    best: Thresholds | None = None
    for values, left, wrong in _divisions(sure, ~agrees, step, np.ones(samples, bool), budget):
        reaching = samples - np.cumsum([0, *left])
        cost = float(np.dot(reaching, costs)) / samples
        if best is None or cost < best.cost:
            best = Thresholds(values, left, wrong, samples, cost)
    assert best is not None
    return best


_Division = tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]


def _divisions(
    sure: NDArray[np.float32], differs: Flags, step: int, here: Flags, budget: int
) -> Iterator[_Division]:
    """Yield thresholds, leaving and wrong samples of the exits.

    Args:
        sure: confidences ``[exits, samples]``.
        differs: whether the head's answer is not the full network's, likewise.
        step: how far apart the numbers of differing samples are that are tried.
        here: whether a sample reaches the first of these exits.
        budget: how many of those that reach it may get another answer.
    """
    if not len(sure):
        yield (), (), ()
        return
    rows = np.flatnonzero(here)
    order = rows[np.argsort(-sure[0, rows], kind="stable")]
    ranked, errors = sure[0, order], np.cumsum(differs[0, order])
    tried: set[int] = set()
    for part in [budget] if len(sure) == 1 else [*range(0, budget, step), budget]:
        count = _leavers(ranked, errors, part)
        if count in tried:
            continue
        tried.add(count)
        staying = here.copy()
        staying[order[:count]] = False
        wrong = int(errors[count - 1]) if count else 0
        threshold = _between(ranked, count)
        later = _divisions(sure[1:], differs[1:], step, staying, budget - wrong)
        for values, left, others in later:
            yield (threshold, *values), (count, *left), (wrong, *others)


def _leavers(ranked: NDArray[np.float32], errors: NDArray[np.int64], budget: int) -> int:
    """Return how many samples may leave, the surest first; equally sure ones leave together."""
    count = int(np.searchsorted(errors, budget, side="right"))
    while 0 < count < len(ranked) and ranked[count - 1] == ranked[count]:
        count -= 1
    return count


def _between(ranked: NDArray[np.float32], count: int) -> float:
    """Return a threshold that only the first ``count`` reach: halfway to the next."""
    if count == 0:
        return inf
    if count == len(ranked):
        return float(np.float32(ranked[-1] * (1 - _BELOW)))
    middle = np.float32((float(ranked[count - 1]) + float(ranked[count])) / 2)
    return float(middle if middle > ranked[count] else ranked[count - 1])


def feature_statistics(
    runner: Runner, samples: Samples, features: Sequence[str]
) -> list[tuple[Array, Array]]:
    """Return mean and one over the standard deviation of each feature, in one pass over the data.

    A feature that never changes keeps its scale. ``features`` are names of outputs
    ``[batch, features]``, head by head.

    Raises:
        DataError: there are no samples.
    """
    count, sums = 0, [np.zeros((2, 1))] * len(features)
    for batch in samples.batches():
        outputs = runner.run(batch)
        each = [outputs[name].astype(np.float64) for name in features]
        added = [np.stack([x.sum(0), np.square(x).sum(0)]) for x in each]
        sums = [before + more for before, more in zip(sums, added, strict=True)]
        count += samples_in(batch)
    if not count:
        raise DataError(
            "calibration data", "has no samples", "give some: thresholds are chosen by them"
        )
    results = []
    for total, squares in sums:
        mean = total / count
        spread = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
        scale = 1 / np.where(spread > _FLAT * np.abs(mean) + _FLAT, spread, 1)
        results.append((mean.astype(np.float32), scale.astype(np.float32)))
    return results


def collect(
    runner: Runner, samples: Samples, heads: Sequence[str], teacher: str
) -> tuple[Array, Flags]:
    """Run all heads on the calibration data, which are never all in memory at once.

    The runner's model has confidences; ``heads`` and ``teacher`` are outputs with logits.

    Returns:
        Confidences, and whether the head's answer is the model's; both ``[exits, samples]``.
    """
    sure: list[Array] = []
    same: list[Flags] = []
    for batch in samples.batches():
        outputs = runner.run(batch)
        sure.append(np.stack([outputs[confidence_name(n + 1)] for n in range(len(heads))]))
        answer = outputs[teacher].argmax(1)
        same.append(np.stack([outputs[name].argmax(1) == answer for name in heads]))
    return np.concatenate(sure, axis=1), np.concatenate(same, axis=1)


def check_answers(
    runner: Runner,
    reference: Batch,
    batch: Batch,
    answers: Sequence[str],
    thresholds: Sequence[float],
) -> None:
    """Compare the answers of a model with exits with what they should be, sample by sample.

    Args:
        runner: of the model with exits.
        reference: outputs of the model that returns all answers, for the same batch.
        batch: the samples.
        answers: names of the outputs with the exits' answers, and last the model's own.
        thresholds: of the exits; infinite if no sample leaves.

    Raises:
        ModelError: they differ: the answer to a sample depends on the others in its batch.
    """
    (answered,) = runner.run(batch).values()
    expected = reference[answers[-1]].copy()
    open_rows = np.ones(len(expected), dtype=bool)
    for number, (name, threshold) in enumerate(zip(answers, thresholds, strict=False), start=1):
        leaves = open_rows & (reference[confidence_name(number)] >= np.float32(threshold))
        expected[leaves] = reference[name][leaves]
        open_rows &= ~leaves
    reach = float(np.abs(expected).max(initial=0.0))
    wrong = np.flatnonzero(~np.all(np.abs(answered - expected) <= _TOLERANCE * reach, axis=1))
    if wrong.size:
        raise ModelError(
            "early exits",
            f"change the answer to sample {int(wrong[0])} of {len(expected)}: the network's "
            "answer for a sample depends on the others in the batch",
            "put the exits elsewhere, or leave this pass out",
        )


def threshold_notes(
    points: Sequence[ExitPoint], chosen: Thresholds, agreement: float, costs: Sequence[float]
) -> tuple[str, ...]:
    """Return how many samples leave where, how many answers agree, and what exits save."""
    parts, notes = [], []
    for point, value, share in zip(points, chosen.values, chosen.shares, strict=False):
        if value < inf:
            parts.append(f"exit {point.number} after {point.after} {share:.1f} %")
            continue
        notes.append(
            f"exit {point.number} after {point.after} is left out: with agreement {agreement:g} "
            "no sample would leave there"
        )
    mean, most = chosen.cost, float(sum(costs))
    return (
        *notes,
        f"of {chosen.samples:,} calibration samples leave at {', '.join(parts)}; "
        f"{chosen.shares[-1]:.1f} % go all the way",
        f"{chosen.agreement:.2f} % of them get the full network's answer, "
        f"{agreement:g} % are required",
        # A sample that goes all the way costs more than before.
        f"a calibration sample takes {mean / 1e6:.4g} million multiply-accumulates on average and "
        f"{most / 1e6:.4g} million at most, heads included ({100 * mean / max(most, 1):.0f} %); "
        "reports count the most",
    )


def nobody_leaves(agreement: float, sure: Array, same: Flags, costs: Sequence[float]) -> ModelError:
    """Return the error for exits at which no sample can leave, with what would change that."""
    remedy = "train longer, or put exits after later layers"
    for lower in (value for value in _LOWER if value < agreement):
        tried = choose_thresholds(sure, same, lower, costs)
        if sum(tried.left):
            leaving = 100 - tried.shares[-1]
            remedy += f", or set agreement: {lower:g}, with which {leaving:.1f} % would leave"
            break
    return ModelError(
        "pass 'early-exit'",
        f"lets none of {sure.shape[1]:,} calibration samples leave early with agreement "
        f"{agreement:g}",
        remedy,
    )
