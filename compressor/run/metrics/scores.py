"""Which output of a model holds the scores of classes, and on which axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compressor.types.tensors import Array, Batch

_IMAGE_AXES = 4


class UnfitError(ValueError):
    """A built-in metric cannot take this target; says what to change."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem)
        self.remedy = remedy


def scores_first(outputs: Batch) -> Batch:
    """Return outputs in an order in which the scores of classes come first, ``[N, ..., classes]``.

    They are the first output that :func:`holds_scores`. If there is none, all is as it was.

    Args:
        outputs: arrays with an axis of samples.
    """
    for name, array in outputs.items():
        scores = np.moveaxis(array, class_axis(array.shape), -1)
        if holds_scores(scores):
            return {name: scores, **{n: a for n, a in outputs.items() if n != name}}
    return outputs


def scores_of(outputs: Batch) -> Array:
    """Return the scores ``[N, ..., classes]``; the largest one decides."""
    name, scores = next(iter(outputs.items()))
    if not holds_scores(scores):
        raise UnfitError(
            f"needs scores of two classes at least, and output {name!r} is {scores.dtype}"
            f"{list(scores.shape)}: one score is always the largest"
            if scores.dtype.kind == "f"
            else f"needs scores of classes, and output {name!r} is {scores.dtype}, not scores",
            "set metric: mse for an output of numbers, or a metric of your own",
        )
    return scores


def holds_scores(array: Array) -> bool:
    """Return whether an array ``[N, ..., classes]`` can hold scores of classes.

    These are floats, or codes of one byte; wider integers are numbers of classes.
    """
    kind, codes = array.dtype.kind, array.dtype.itemsize == 1
    typed = kind not in "iub" or (codes and kind != "b")
    return typed and array.ndim > 1 and array.shape[-1] != 1


def class_axis(shape: Sequence[int]) -> int:
    """Return the axis of classes: the last one, but for scores of the pixels of an image.

    These, ``[N, classes, height, width]`` or ``[N, height, width, classes]`` (or a volume's), have
    the classes on the axis that is not as long as the others; if all differ, on the shorter end.
    """
    if len(shape) < _IMAGE_AXES:
        return -1
    start, end = shape[1], shape[-1]
    if len(set(shape[2:])) == 1 and start != end:
        return 1
    if len(set(shape[1:-1])) == 1 and start != end:
        return -1
    return 1 if start <= end else -1
