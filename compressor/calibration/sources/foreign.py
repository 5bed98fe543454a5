"""Calling the user's own functions, and checking what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from compressor.errors import CompressorError, DataError
from compressor.types.tensors import Batch

ResultT = TypeVar("ResultT")
_END = object()


def call(subject: str, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return ``function(*arguments)``.

    Raises:
        DataError: the function raised something; ``subject`` names it and the cause is chained.
    """
    try:
        return function(*arguments)
    except CompressorError:
        raise
    # It is not our code, so nothing is known of what it raises.
    except Exception as error:
        raise DataError(
            subject,
            f"raised {type(error).__name__}: {error}",
            "correct the function; --debug shows where it was",
        ) from error


def iterate(subject: str, function: Callable[[], Any]) -> Iterator[Any]:
    """Yield what the iterable that the function returns yields; raises as ``call`` does."""
    iterator = call(subject, iter, call(subject, function))
    while (item := call(subject, next, iterator, _END)) is not _END:
        yield item


def check_batch(subject: str, value: Any) -> Batch:
    """Return a value that is a batch: arrays by name with equal first axes.

    Raises:
        DataError: it is something else; the error says what.
    """
    problem = _problem(value)
    if problem is None:
        return dict(value)
    raise DataError(
        subject,
        f"returned {problem}",
        "return a dictionary of numpy arrays, each with the batch as first axis",
    )


def _problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"a {_kind(value)}"
    if not value:
        return "an empty dictionary"
    for name, array in value.items():
        if not isinstance(name, str):
            return f"a dictionary with the key {name!r}"
        if not isinstance(array, np.ndarray):
            return f"{name!r} as a {_kind(array)}"
        if not array.ndim:
            return f"{name!r} as a single number"
    lengths = {name: len(array) for name, array in value.items()}
    if len(set(lengths.values())) > 1:
        return "first axes that differ: " + ", ".join(f"{k!r} {n}" for k, n in lengths.items())
    return None


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
