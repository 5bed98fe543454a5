"""Sources from the user's functions: factories of batches, and transforms."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from compressor.errors import CompressorError, DataError, listed
from compressor.types.data import Source, SourceInfo
from compressor.types.tensors import Batch, Feed, TensorSpec, cut, samples_in

ResultT = TypeVar("ResultT")
_END = object()
_NUMBERS = (np.generic, bool, int, float)


def call(subject: str, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return ``function(*arguments)``.

    Raises:
        DataError: the function raised something; ``subject`` names it and the cause is chained.
    """
    try:
        return function(*arguments)
    except CompressorError:
        raise
    # It is not our code, so nothing is known of what it raises; a script's main function exits.
    except (Exception, SystemExit) as error:
        raise DataError(
            subject,
            f"raised {type(error).__name__}: {error}",
            "correct the function; --debug shows where it was",
        ) from error


def iterate(subject: str, function: Callable[[], Any]) -> Iterator[Any]:
    """Yield the items of the iterable that the function returns; raises as ``call`` does."""
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


def check_feed(subject: str, value: Any) -> Feed:
    """Return a value that is a feed: arrays or numbers by name.

    Raises:
        DataError: it is something else; the error says what.
    """
    if isinstance(value, dict):
        value = {
            name: np.asarray(array) if isinstance(array, _NUMBERS) else array
            for name, array in value.items()
        }
    problem = _no_arrays(value)
    if problem is None:
        return Feed(value)
    raise DataError(
        subject, f"returned {problem}", "return a dictionary of numpy arrays and numbers"
    )


def _problem(value: Any) -> str | None:
    problem = _no_arrays(value)
    if problem is not None:
        return problem
    for name, array in value.items():
        if not array.ndim:
            return f"{name!r} as a single number"
    lengths = {name: len(array) for name, array in value.items()}
    if len(set(lengths.values())) > 1:
        return "first axes that differ: " + ", ".join(f"{k!r} {n}" for k, n in lengths.items())
    return None


def _no_arrays(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"a {_kind(value)}"
    if not value:
        return "an empty dictionary"
    for name, array in value.items():
        if not isinstance(name, str):
            return f"a dictionary with the key {name!r}"
        if not isinstance(array, np.ndarray):
            return f"{name!r} as a {_kind(array)}"
    return None


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


_Form = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class FactorySource:
    """Batches of any size from a function that yields the same samples at each call."""

    # returns an iterable of batches, arrays by name with the samples as first axis
    make: Callable[[], Iterable[Batch]]
    name: str  # how errors name the function, such as `pkg.mod:fn`
    # names in the model to names in its batches; all arrays if empty
    fields: Mapping[str, str] = field(default_factory=dict)
    samples: int | None = None

    @property
    def subject(self) -> str:
        """How errors name this source."""
        return f"data factory '{self.name}'"

    def info(self) -> SourceInfo:
        """Describe the first batch; how many samples there are is unknown.

        Raises:
            DataError: the function raised, or made something else than batches.
        """
        for batch in self._made():
            specs = (
                TensorSpec(name, ("batch", *array.shape[1:]), array.dtype.name)
                for name, array in batch.items()
            )
            return SourceInfo(None, tuple(specs))
        raise DataError(self.subject, "yielded no samples", "yield at least one batch")

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``size`` samples, at most ``limit`` in all; raises as ``info`` does."""
        limits = [most for most in (self.samples, limit) if most is not None]
        return regroup(self._made(), size, min(limits, default=None))

    def digest(self) -> str:
        """Return a SHA-256 of the samples, independent of batching; computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        hashes: dict[str, hashlib._Hash] = {}
        most = self.samples
        for batch in self._made():
            used = batch if most is None else cut(batch, 0, most)
            for name, array in used.items():
                start = f"{name} {array.dtype.str} {array.shape[1:]} ".encode()
                digest = hashes.setdefault(name, hashlib.sha256(start))
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            most = None if most is None else most - samples_in(used)
            if most == 0:
                break
        return hashlib.sha256(b"".join(h.digest() for _, h in sorted(hashes.items()))).hexdigest()

    def _made(self) -> Iterator[Batch]:
        """Yield the batches under the fields' names, without empty ones; all must be alike."""
        form: _Form = {}
        for value in iterate(self.subject, self.make):
            batch = self._renamed(check_batch(self.subject, value))
            if not samples_in(batch):
                continue
            objects = [name for name, array in batch.items() if array.dtype.hasobject]
            if objects:
                raise DataError(
                    self.subject,
                    f"yielded {objects[0]!r} with Python objects",
                    "yield bool, numbers or fixed-length text",
                )
            this_form = {name: (array.shape[1:], array.dtype.name) for name, array in batch.items()}
            form = form or this_form
            if this_form != form:
                forms = f"{_form_text(form)}, then {_form_text(this_form)}"
                raise DataError(
                    self.subject,
                    f"yielded batches that differ: {forms}",
                    "yield batches of the same names, dtypes and shapes except for the first axis",
                )
            yield batch

    def _renamed(self, batch: Batch) -> Batch:
        if not self.fields:
            return batch
        check_fields(self.subject, "batch", self.fields, batch)
        return {name: batch[stored] for name, stored in self.fields.items()}


def check_fields(
    subject: str, what: str, fields: Mapping[str, str], arrays: Mapping[str, Any]
) -> None:
    """Raise ``DataError`` where a function yielded a ``what`` without one of its fields' arrays."""
    for stored in fields.values():
        if stored not in arrays:
            remedy = f"it has {', '.join(map(repr, sorted(arrays)))}"
            raise DataError(subject, f"yielded a {what} without {stored!r}", remedy)


def _form_text(form: _Form) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in form.items())


@dataclass(frozen=True)
class TransformedSource:
    """A source followed by a transform, ``fn(batch)`` or ``fn(batch, rng)``.

    A parameter named ``rng`` receives a generator seeded with ``seed`` and the batch's index, so
    the same batch size gives the same batches at each call.
    """

    source: Source
    transform: Callable[..., Batch]  # maps a batch to a batch
    name: str  # how errors name the function, such as `pkg.mod:fn`
    seed: int = 0  # where the generators start

    @property
    def subject(self) -> str:
        """How errors name the transform."""
        return f"transform '{self.name}'"

    def info(self) -> SourceInfo:
        """Describe the source before the transform."""
        return self.source.info()

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield transformed batches.

        Raises:
            DataError: the transform raised, or returned something else than a batch.
        """
        for index, batch in enumerate(self.source.batches(size, limit)):
            yield self.transformed(batch, (self.seed, index))

    @property
    def random(self) -> bool:
        """The transform draws random numbers."""
        return wants_rng(self.transform)

    def transformed(self, batch: Batch, seed: Sequence[int]) -> Batch:
        """Return the transformed batch; ``seed`` is for the transform's generator, if it takes one.

        Raises:
            DataError: the transform raised, or returned something else than a batch of as many
                samples.
        """
        drawn = [np.random.default_rng(tuple(seed))] if self.random else []
        given, names = samples_in(batch), sorted(batch)  # the transform may change it in place
        check = check_feed if isinstance(batch, Feed) else check_batch
        try:
            made = check(self.subject, call(self.subject, self.transform, batch, *drawn))
        except DataError as error:
            self._check_names(error.__cause__, names)
            raise
        if samples_in(made) != given:
            raise DataError(
                self.subject,
                f"returned {samples_in(made)} samples for {given}",
                "return one sample for each input sample; remove samples from the data itself",
            )
        return made

    def _check_names(self, raised: BaseException | None, names: Sequence[str]) -> None:
        """Blame the names of arrays where the transform asked for one that is not there."""
        asked = raised.args[0] if isinstance(raised, KeyError) and raised.args else None
        if isinstance(asked, str) and asked not in names:
            raise DataError(
                "inputs",
                f"has the arrays {listed(names)}, and {self.subject} asks for {asked!r}",
                "name the array so under inputs, or correct the function; --debug shows where it "
                "was",
            ) from raised

    def digest(self) -> str:
        """Return a SHA-256 of the source's digest, seed, the function's file, and a first sample.

        The sample shows what the function reads elsewhere, such as a file of means. It does not
        count where it differs each time.
        """
        parts = [self.source.digest().encode(), self.name.encode(), str(self.seed).encode()]
        code = _source_file(self.transform)
        if code is not None:
            parts.append(hashlib.sha256(code.read_bytes()).digest())
        for batch in self.source.batches(1, 1):
            once, again = (
                _content(self.transformed(deepcopy(batch), (self.seed, 0))) for _ in range(2)
            )
            parts += [once] if once == again else []
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _content(batch: Batch) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(batch.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def wants_rng(function: Callable[..., object]) -> bool:
    """Return whether a function's second parameter is named ``rng``."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return parameters[1:2] == ["rng"]


def _source_file(function: Callable[..., object]) -> Path | None:
    try:
        name = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # built in, or a callable object
        return None
    path = Path(name) if name else None
    return path if path and path.is_file() else None


def regroup(batches: Iterable[Batch], size: int, limit: int | None = None) -> Iterator[Batch]:
    """Yield the same samples in batches of ``size``, the last perhaps smaller.

    >>> batches = [{"x": np.zeros((3, 8))}, {"x": np.zeros((2, 8))}]
    >>> [len(batch["x"]) for batch in regroup(batches, 4)]
    [4, 1]

    At most ``limit`` samples are used, and no batch beyond them is requested. All batches have the
    same names, dtypes and shapes except for the first axis.
    """
    if size < 1:
        raise ValueError(f"batches of {size} samples")
    parts: list[Batch] = []
    have = 0
    for batch in _limited(batches, limit):
        parts.append(batch)
        have += samples_in(batch)
        while have >= size:
            joined = _join(parts)
            yield cut(joined, 0, size)
            have -= size
            parts = [cut(joined, size, None)] if have else []
    if have:
        yield _join(parts)


def _limited(batches: Iterable[Batch], limit: int | None) -> Iterator[Batch]:
    if limit is None:
        yield from batches
        return
    if limit <= 0:
        return
    for batch in batches:
        yield cut(batch, 0, limit)
        limit -= samples_in(batch)
        if limit <= 0:
            return


def _join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
