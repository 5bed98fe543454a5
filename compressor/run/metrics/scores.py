"""Which output of a model holds the scores of classes, and on which axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from compressor.types.tensors import Array, Batch, TensorSpec

_IMAGE_AXES = 4
_OPEN = 2  # stands for the size of an axis that a model leaves open


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
    found = _first_scores(outputs)
    if found is None:
        return outputs
    name, scores = found
    return {name: scores, **{n: a for n, a in outputs.items() if n != name}}


def scores_of(outputs: Batch) -> Array:
    """Return the scores ``[N, ..., classes]``; the largest one decides."""
    name, scores = next(iter(outputs.items()))
    if holds_scores(scores):
        return scores
    if scores.dtype.kind == "f":
        raise UnfitError(
            f"needs scores of two classes at least, and output {name!r} is {scores.dtype}"
            f"{list(scores.shape)}: one score is always the largest",
            "set metric: mse for an output of numbers, or a metric of your own",
        )
    raise UnfitError(
        f"needs scores of classes, and output {name!r} is {scores.dtype}, not scores",
        "set metric: accuracy or agreement for an output of numbers of classes, mse for one of "
        "other numbers, or a metric of your own",
    )


def holds_scores(array: Array) -> bool:
    """Return whether an array ``[N, ..., classes]`` can hold scores of classes.

    These are floats, or codes of one byte; wider integers are numbers of classes.
    """
    kind, codes = array.dtype.kind, array.dtype.itemsize == 1
    typed = kind not in "iub" or (codes and kind != "b")
    return typed and array.ndim > 1 and array.shape[-1] != 1


def holds_numbers(array: Array) -> bool:
    """Return whether an array can hold numbers of classes: whole ones that are no scores."""
    return array.dtype.kind in "iub" and (array.dtype.kind == "b" or array.dtype.itemsize > 1)


def numbers_first(outputs: Batch) -> Batch:
    """Return outputs in an order in which the first that :func:`holds_numbers` comes first."""
    name = next((name for name, array in outputs.items() if holds_numbers(array)), None)
    if name is None:
        return outputs
    return {name: outputs[name], **{n: a for n, a in outputs.items() if n != name}}


def gives_numbers(outputs: Iterable[TensorSpec]) -> bool:
    """Return whether a model decides for classes itself: an output has their numbers, none scores.

    A map of classes, such as that of a segmentation, is one.
    """
    arrays = _drawn(outputs)
    return _first_scores(arrays) is None and any(map(holds_numbers, arrays.values()))


def scored_output(outputs: Iterable[TensorSpec]) -> str | None:
    """Return the output that metrics about classes read; ``None`` without scores."""
    found = _first_scores(_drawn(outputs))
    return None if found is None else found[0]


def _first_scores(outputs: Batch) -> tuple[str, Array] | None:
    """Return the first output that :func:`holds_scores`, with the classes last."""
    for name, array in outputs.items():
        scores = np.moveaxis(array, class_axis(array.shape), -1) if array.ndim else array
        if holds_scores(scores):
            return name, scores
    return None


def _drawn(outputs: Iterable[TensorSpec]) -> Batch:
    """Return arrays of the outputs' types and shapes, which take no memory."""
    arrays: Batch = {}
    for spec in outputs:
        shape = tuple(known_sizes(spec.shape))
        dtype = spec.dtype if spec.dtype in np.sctypeDict else "float32"
        arrays[spec.name] = np.broadcast_to(np.zeros((), dtype), shape)
    return arrays


def known_sizes(shape: Sequence[int | str | None]) -> list[int]:
    """Return a shape whose open axes have a length, as for a batch of two."""
    return [size if isinstance(size, int) else _OPEN for size in shape]


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
