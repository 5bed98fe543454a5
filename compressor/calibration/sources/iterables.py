"""Batches of a Python program: a DataLoader, a datasets.Dataset, arrays, or any iterable."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch.utils.data import DataLoader, Dataset

from compressor.calibration.sources.user_functions import iterate
from compressor.errors import DataError
from compressor.types.tensors import Array, Batch, TensorSpec

TARGET = "target"
"""Name of a target that comes without one, as the second of a pair does."""

TARGETS = ("labels", "label", "targets", TARGET, "y")
"""Names that right answers usually have in a dictionary, the first that is there."""

_BATCH = 32  # of what comes in single samples
_FORMS = "tensors, arrays, tuples of them with the inputs first, or dictionaries by name"


@dataclass(frozen=True)
class ProgramBatches:
    """Batches of arrays by name, made of what a program iterates over.

    Random numbers start from the same seed each time, so that a loader that shuffles has one order;
    the program's own are not touched.

    Attributes:
        read: returns the program's iterable.
        name: how errors name it.
        inputs: the model's.
        target: name of the array with the right answers, if there is one.
        complete: pass on all that a dictionary has, for what renames or transforms it.
    """

    read: Callable[[], Iterable[Any]]
    name: str
    inputs: tuple[TensorSpec, ...]
    target: str | None
    seed: int
    complete: bool

    def __call__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            DataError: the program's code raised, or an item is no batch.
        """
        for item in _items(self.read, self.name, self.seed):
            yield self._batch(item)

    def _batch(self, item: Any) -> Batch:
        first, rest = parts(item, len(self.inputs))
        names = [spec.name for spec in self.inputs]
        if isinstance(first, Mapping):
            wanted = None if self.complete else {*names, self.target}
            batch: Batch = {}
            for name, value in first.items():
                if wanted is None or name in wanted:
                    several = name == self.target and isinstance(value, Mapping)
                    batch |= (
                        self._answers(str(name), value)
                        if several
                        else {str(name): self._array(str(name), value)}
                    )
        else:
            if len(first) > len(names):
                raise DataError(
                    f"data {self.name!r}",
                    f"has {len(first)} inputs in a batch, and the model takes {len(names)}",
                    f"let each batch be {_FORMS}",
                )
            batch = {n: self._array(n, value) for n, value in zip(names, first, strict=False)}
        if self.target is not None and self.target not in batch and rest:
            batch |= self._answers(self.target, rest[0])
        return batch

    def _answers(self, name: str, value: Any) -> Batch:
        """Return a target; a dictionary of several is an array ``name.key`` for each."""
        if not isinstance(value, Mapping):
            return {name: self._array(name, value)}
        return {f"{name}.{key}": self._array(f"{name}.{key}", v) for key, v in value.items()}

    def _array(self, name: str, value: Any) -> Array:
        array = as_array(value, f"data {self.name!r}", name)
        declared = next((np.dtype(s.dtype) for s in self.inputs if s.name == name), array.dtype)
        # What PyTorch users do by ``.float()``; bfloat16 is of no kind that numpy knows.
        floats = array.dtype.kind == "f" and (declared.kind == "f" or declared == bfloat16)
        return array.astype(declared, copy=False) if floats else array


def program_batches(
    items: Any,
    name: str,
    inputs: Sequence[TensorSpec],
    target: str | None,
    seed: int,
    *,
    complete: bool,
) -> ProgramBatches:
    """Return a program's data as batches for a model.

    Args:
        items: as :func:`reader` takes them.
        target: its name; by default what follows the inputs in a tuple, or has a usual name
            (``labels``, ``label``, ``targets``, ``target``, ``y``) in a dictionary.

    Raises:
        DataError: there are no batches, or they differ from one reading to the next.
    """
    read = reader(items, name)
    first = first_item(read, name, seed)
    target = target or _target_of(first, [spec.name for spec in inputs])
    made = ProgramBatches(read, name, tuple(inputs), target, seed, complete)
    batch, again = (next(iter(made())) for _ in range(2))
    if any(array.tobytes() != again[n].tobytes() for n, array in batch.items()):
        raise DataError(
            f"data {name!r}",
            "returns other samples each time that it is read",
            "let it draw from the random numbers of torch, numpy or random, or give a list",
        )
    return made


def _target_of(item: Any, inputs: Sequence[str]) -> str | None:
    first, rest = parts(item, len(inputs))
    if rest:
        return TARGET
    names = first if isinstance(first, Mapping) else ()
    return next((n for n in TARGETS if n in names and n not in inputs), None)


def reader(items: Any, name: str) -> Callable[[], Iterable[Any]]:
    """Return a function that gives the same batches each time.

    Args:
        items: a function that returns an iterable; a DataLoader; a Dataset of PyTorch or of
            ``datasets``, which is read in batches of 32; a tensor, an array, a tuple of them or a
            dictionary of them, which is one batch; or another iterable of batches. An iterator,
            which can be read once, is kept in memory.

    Raises:
        DataError: it is something else.
    """
    if isinstance(items, str | os.PathLike):
        remedy = "name a file as a spec does, such as {'npz': 'calib.npz'}, or give its arrays"
        raise DataError(f"data {name!r}", f"is a {type(items).__name__}, not data", remedy)
    if isinstance(items, torch.Tensor | np.ndarray | Mapping | tuple):
        return lambda: (items,)
    if hasattr(items, "iter") and hasattr(items, "column_names"):  # of the library datasets
        return lambda: items.iter(_BATCH)
    if isinstance(items, Dataset):
        return lambda: DataLoader(items, _BATCH)
    if isinstance(items, DataLoader):
        return _restarted(items)
    if isinstance(items, Iterator):
        kept = list(iterate(f"data {name!r}", lambda: items))
        return lambda: kept
    if isinstance(items, Iterable):
        return lambda: items
    if callable(items):
        read: Callable[[], Iterable[Any]] = items  # what it returns is checked when it is read
        return read
    kind = type(items).__name__
    raise DataError(f"data {name!r}", f"is a {kind}, which holds no batches", f"give {_FORMS}")


def _restarted(loader: DataLoader[Any]) -> Callable[[], Iterable[Any]]:
    """Return a function that lets a loader's own generator begin where it is now."""
    generator = loader.generator
    state = generator.get_state() if isinstance(generator, torch.Generator) else None

    def read() -> Iterable[Any]:
        if state is not None:
            generator.set_state(state)
        return loader

    return read


def first_item(read: Callable[[], Iterable[Any]], name: str, seed: int = 0) -> Any:
    """Return the first item that a program gives, as it is.

    Raises:
        DataError: there is none.
    """
    for item in _items(read, name, seed):
        return item
    raise DataError(f"data {name!r}", "has no batches", "give at least one")


def parts(item: Any, inputs: int) -> tuple[Mapping[Any, Any] | Sequence[Any], Sequence[Any]]:
    """Return the inputs in a program's batch, by name or in their order, and what follows them.

    >>> parts((1, 2, 3), inputs=2)
    ((1, 2), (3,))
    """
    if isinstance(item, Mapping):
        return item, ()
    if not isinstance(item, tuple | list) or not item:
        return (item,), ()
    if isinstance(item[0], Mapping | tuple | list):
        return item[0], item[1:]
    return item[:inputs], item[inputs:]


def as_array(value: Any, subject: str, name: str) -> Array:
    """Return an array of what a program gives as one.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise DataError(subject, f"has {name!r} of no one shape", f"give {_FORMS}") from error
    if array.dtype.kind in "biufc" and not array.ndim:
        remedy = "give an axis of samples, the first, with one value for each"
        raise DataError(subject, f"has {name!r} as a single number", remedy)
    if array.dtype.hasobject or not array.ndim:
        raise DataError(
            subject, f"has {name!r} as a {type(value).__name__}", f"let each batch be {_FORMS}"
        )
    return array


def _items(read: Callable[[], Iterable[Any]], name: str, seed: int) -> Iterator[Any]:
    """Yield what a program gives, with random numbers of its own."""
    own = _RandomState(seed)
    with own.swapped():
        iterator = iterate(f"data {name!r}", read)
    while True:
        with own.swapped():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class _RandomState:
    """States of the random numbers of torch, numpy and Python."""

    def __init__(self, seed: int):
        with random_numbers_kept():
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % (1 << 32))  # noqa: NPY002  # what datasets draw from
            random.seed(seed)
            self._states = _states()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Use these states inside the block, and restore the program's own afterwards."""
        with random_numbers_kept():
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = _states()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave the program's random numbers as they are, whatever the block draws or seeds."""
    before = _states()
    try:
        yield
    finally:
        _set_states(before)


def _states() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def _set_states(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])
