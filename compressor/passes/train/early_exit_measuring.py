"""What exits do on calibration data: confidences, agreement, answers and time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from compressor.errors import DataError, ModelError
from compressor.passes.train.early_exit_heads import confidence_name
from compressor.passes.train.early_exit_thresholds import Flags
from compressor.types.carrier import Runner
from compressor.types.data import Samples
from compressor.types.tensors import Array, Batch

_TOLERANCE = 1e-4  # of the largest answer; products of other sizes round differently
_FLAT = 1e-6  # of a feature's mean: what varies less does so by rounding
_ROUNDS = 5
_SECONDS = 3.0
_LEAST = 8  # samples that are timed


def feature_statistics(
    runner: Runner, samples: Samples, features: Sequence[str]
) -> list[tuple[Array, Array]]:
    """Return mean and one over the standard deviation of each feature, in one pass over the data.

    A feature that never changes is left as large as it is.

    Args:
        runner: yields the features ``[batch, features]`` by name.
        samples: the data.
        features: their names, head by head.

    Raises:
        DataError: there are no samples.
    """
    count, sums = 0, [np.zeros((2, 1))] * len(features)
    for batch in samples.batches():
        found = runner.run(batch)
        each = [found[name].astype(np.float64) for name in features]
        own = [np.stack([x.sum(0), np.square(x).sum(0)]) for x in each]
        sums = [before + more for before, more in zip(sums, own, strict=True)]
        count += len(next(iter(batch.values())))
    if not count:
        raise _no_samples()
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
    """Run all heads on the calibration data, which are never in memory together.

    Args:
        runner: of the model with heads and confidences.
        samples: the data.
        heads: outputs with the heads' logits.
        teacher: output with the model's.

    Returns:
        Confidences, and whether the head's answer is the model's; both ``[exits, samples]``.

    Raises:
        DataError: there are no samples.
    """
    sure: list[Array] = []
    same: list[Flags] = []
    for batch in samples.batches():
        found = runner.run(batch)
        sure.append(np.stack([found[confidence_name(n + 1)] for n in range(len(heads))]))
        answer = found[teacher].argmax(1)
        same.append(np.stack([found[name].argmax(1) == answer for name in heads]))
    if not sure:
        raise _no_samples()
    return np.concatenate(sure, axis=1), np.concatenate(same, axis=1)


def check_answers(
    runner: Runner,
    reference: Batch,
    batch: Batch,
    answers: Sequence[str],
    thresholds: Sequence[float],
) -> None:
    """Compare what a model with exits answers with what it should, sample by sample.

    Args:
        runner: of the model with exits.
        reference: outputs of the model that gives all answers, for the same batch.
        batch: the samples.
        answers: which of them hold the exits' answers and then the model's own.
        thresholds: of the exits; infinite where nobody leaves.

    Raises:
        ModelError: they differ: what a sample is answered depends on the others in its batch.
    """
    (found,) = runner.run(batch).values()
    wanted = reference[answers[-1]].copy()
    open_rows = np.ones(len(wanted), dtype=bool)
    for number, (name, threshold) in enumerate(zip(answers, thresholds, strict=False), start=1):
        leaves = open_rows & (reference[confidence_name(number)] >= np.float32(threshold))
        wanted[leaves] = reference[name][leaves]
        open_rows &= ~leaves
    reach = float(np.abs(wanted).max(initial=0.0))
    wrong = np.flatnonzero(~np.all(np.abs(found - wanted) <= _TOLERANCE * reach, axis=1))
    if wrong.size:
        raise ModelError(
            "early exits",
            f"change the answer to sample {int(wrong[0])} of {len(wanted)}: what the network gives "
            "for a sample depends on the others in the batch",
            "put the exits elsewhere, or leave this pass out",
        )


def mean_latencies(
    runners: Sequence[Runner], batch: Batch, seconds: float = _SECONDS
) -> tuple[list[float], int]:
    """Time models at batch 1, sample after sample in turn.

    Args:
        runners: the models.
        batch: samples.
        seconds: as many samples are used as these suffice for, though at least 8.

    Returns:
        Mean milliseconds a sample for each model, of each sample's best of five; and how many
        samples there were.
    """
    size = len(next(iter(batch.values())))
    alone = [{n: a[i : i + 1] for n, a in batch.items()} for i in range(size)]
    once = 0.0
    for runner in (*runners, *runners):
        begin = time.perf_counter()
        runner.run(alone[0])
        once += (time.perf_counter() - begin) / 2
    count = min(size, max(_LEAST, int(seconds / (_ROUNDS * once))))
    times = np.full((len(runners), count), np.inf)
    order = list(enumerate(runners))
    for turn in range(_ROUNDS):
        for place in range(count):
            for index, runner in order if (turn + place) % 2 == 0 else reversed(order):
                begin = time.perf_counter()
                runner.run(alone[place])
                times[index, place] = min(times[index, place], time.perf_counter() - begin)
    return [float(t) * 1e3 for t in times.mean(axis=1)], count


def _no_samples() -> DataError:
    return DataError("calibration data", "have no samples", "give some: thresholds need them")
