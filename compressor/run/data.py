"""Open a spec's data, and check that it fits the model before anything heavy starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, cast

from compressor.calibration.sources.feeds import FeedFactory, FeedFolder
from compressor.calibration.sources.file_source import PathSource
from compressor.calibration.sources.folds import Fold, fold_numbers, fold_of
from compressor.calibration.sources.iterables import program_batches, reader
from compressor.calibration.sources.tokens import TokenSource
from compressor.calibration.sources.user_functions import FactorySource, TransformedSource
from compressor.errors import DataError, SpecError, located, suggestion
from compressor.files import json_sha256
from compressor.run.causal import check_windows
from compressor.run.recurrence import FeedSequence, Recurrence, make_recurrence
from compressor.spec.keys import FEEDS
from compressor.spec.load import FACTORY, DataEntry, Spec
from compressor.spec.user_code import code_digest, importable
from compressor.types.carrier import Carrier
from compressor.types.data import Source, SourceInfo
from compressor.types.tensors import (
    Array,
    Batch,
    TensorSpec,
    answers,
    fixed_batch,
    samples_in,
    unstackable,
)

_BATCH = 32


@dataclass(frozen=True)
class Data:
    """One opened data source.

    Attributes:
        role: ``calibration``, ``evaluation`` or ``training``.
        source: where batches come from, transform included.
        target: name of the array with the labels, if there is one.
        code: hash of the user's code that makes or transforms batches.
        feeds: each sample is a whole feed.
        recurrence: each sample is a sequence of feeds, over which a state is carried.
    """

    role: str
    source: Source
    target: str | None
    batch: int
    code: str
    where: str
    feeds: bool = False
    recurrence: Recurrence | None = None

    def batches(self, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``batch`` samples, single feeds or sequences, at most ``limit``."""
        batches = self.source.batches(self.batch, limit)
        return batches if self.recurrence is None else map(FeedSequence, batches)

    def unrolled(self, carrier: Carrier, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield what a model takes at once: of sequences single steps, with that model's state.

        Args:
            batches: some of :meth:`batches`.
        """
        if self.recurrence is None:
            yield from batches
            return
        runner = carrier.runner()
        for sequence in batches:
            for feed, _ in self.recurrence.steps(sequence, runner.run):
                yield feed

    def first(self, samples: int) -> Batch:
        """Return the first samples as one batch; or the first feed, or step of a sequence.

        Raises:
            DataError: there are none.
        """
        for batch in self.source.batches(samples, samples):
            return batch if self.recurrence is None else self.recurrence.first(batch)
        raise DataError(f"{self.role} data", "has no samples", "check the source").at(self.where)

    def probes(self, samples: int, carrier: Carrier) -> list[Batch]:
        """Return about ``samples`` first samples as one batch, or as single feeds.

        Args:
            carrier: the model that states come from.
        """
        if not self.feeds:
            return [self.first(samples)]
        return list(islice(self.unrolled(carrier, self.batches()), samples))

    def cached(self) -> Data:
        """Return the same data with a cache of read and transformed batches, if they are small."""
        single = self.feeds or self.recurrence is not None
        done = single or isinstance(self.source, CachedSource)
        return self if done else replace(self, source=CachedSource(self.source))

    @property
    def preparation(self) -> str:
        """What is done to the samples before any transform, for people; empty if nothing is."""
        source = self.source
        while isinstance(source, TransformedSource | Fold):
            source = source.source
        return source.described() if isinstance(source, PathSource) else ""

    @cached_property
    def samples(self) -> int | None:
        """The number of samples, if known before reading them."""
        return self.source.info().samples

    @property
    def runs(self) -> int | None:
        """How many samples a model is run on, if known: of sequences each step counts."""
        return self.samples if self.recurrence is None else None

    @cached_property
    def digest(self) -> str:
        """Hash of the content and of the code that transforms it."""
        content: list[Any] = [self.source.digest(), self.code, self.target]
        if self.recurrence is not None:
            content.append(dict(self.recurrence.state))
        return json_sha256(content)


@dataclass(frozen=True)
class CachedSource:
    """A source that caches its batches when they are first read, unless they take much memory."""

    source: Source
    most: int = 32 << 20  # bytes
    _batches: dict[int, list[Batch]] = field(default_factory=dict)  # by batch size

    def info(self) -> SourceInfo:
        """Describe the source."""
        return self.source.info()

    def digest(self) -> str:
        """Return the source's digest."""
        return self.source.digest()

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches, which may be modified: the cache has copies."""
        if limit is not None:
            yield from self.source.batches(size, limit)
        elif size in self._batches:
            yield from map(_copied, self._batches[size])
        else:
            held: list[Batch] | None = []
            left = self.most
            for batch in self.source.batches(size):
                left -= sum(array.nbytes for array in batch.values())
                held = None if held is None or left < 0 else [*held, _copied(batch)]
                yield batch
            if held is not None:
                self._batches[size] = held


def _copied(batch: Batch) -> Batch:
    return {name: array.copy() for name, array in batch.items()}


def open_data(
    spec: Spec, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, Data]:
    """Open all data of a spec by its role.

    Args:
        inputs: the model's; where they fix the batch, that is the default.
        outputs: the model's; a state is one of them.

    Raises:
        SpecError: a function does not import, or a state is none that can be carried.
        DataError: a file is unusable.
    """
    check_windows(spec)
    opened = {}
    for role, entry in spec.data.items():
        with located(entry.where):
            data = _open(spec, entry, inputs)
            if entry.keys.state:
                recurrence = make_recurrence(entry.keys.state, inputs, outputs, f"{data.role} data")
                data = replace(data, recurrence=recurrence)
            opened[role] = data
    return opened


def _open(spec: Spec, entry: DataEntry, inputs: Sequence[TensorSpec]) -> Data:
    code, target = "", entry.keys.target
    samples, feeds, fold = entry.keys.samples, entry.keys.samples == FEEDS, entry.keys.fold
    # A feed may hold the first values of states.
    taken = entry.keys.feeds, tuple(entry.keys.state), fold_numbers(fold)
    size = 1 if feeds else entry.keys.batch or fixed_batch(inputs) or _usual_batch(entry)
    with importable([spec.folder]):
        if entry.kind == FACTORY:
            assert entry.reference is not None
            given = entry.reference in spec.objects
            make = spec.symbol(entry.reference, f"data.{entry.role}.factory")
            if given and feeds:
                make = reader(make, f"data.{entry.role}")
            elif given:
                make = program_batches(
                    make,
                    f"data.{entry.role}",
                    inputs,
                    target,
                    spec.seed,
                    complete=bool(entry.keys.inputs or entry.keys.transform),
                )
                target = make.target
            fields = dict(entry.keys.inputs)
            if entry.keys.target is not None and fields:
                fields[entry.keys.target] = entry.keys.target
            source: Source = (
                FactorySource(make, entry.reference, fields, None if fold else samples)
                if isinstance(samples, int | None)
                else FeedFactory(make, entry.reference, fields, *taken)
            )
            code += "" if given else code_digest(make)
        elif feeds:
            assert isinstance(entry.options, PathSource)
            source = FeedFolder(entry.options.path, entry.options.fields, *taken)
        else:
            # The catalog's sources are options that can be read.
            source = cast("Source", entry.options)
            if isinstance(entry.options, TokenSource):
                source = entry.options.fitted(inputs, entry.role, entry.keys.target)
                if entry.keys.transform is None:  # which may do anything about padding
                    source.check_mask(inputs, entry.role, size)
        if fold is not None and not feeds:
            source = fold_of(source, fold, samples if isinstance(samples, int) else None)
        if entry.keys.transform is not None:
            transform = spec.symbol(entry.keys.transform, f"data.{entry.role}.transform")
            source = TransformedSource(source, transform, entry.keys.transform, spec.seed)
            code += code_digest(transform)
    return Data(entry.role, source, target, size, code, entry.where, feeds)


def _usual_batch(entry: DataEntry) -> int:
    """Return the size of batches where nothing sets it.

    Calibration takes lines of text one by one: alone they need no padding, whose values would
    count in ranges and second moments as those of text do.
    """
    options = entry.options
    lines = isinstance(options, TokenSource) and not options.in_windows
    return 1 if lines and entry.role == "calibration" else _BATCH


def check_data(
    data: Data, inputs: Sequence[TensorSpec], limits: Mapping[str, int] | None = None
) -> Batch:
    """Read the headers and one sample, which is returned, and compare them with a model's inputs.

    Args:
        limits: the number of rows of the table that an input indexes, by input.

    Raises:
        DataError: there is no sample, an input is missing, shape or dtype differ, or the sample
            indexes a row that its table does not have.
        SpecError: the model's batch is fixed, and the data come in other batches.
    """
    with located(data.where):
        info = data.source.info()
        if info.samples == 0:
            raise DataError(f"{data.role} data", "has no samples", "check the source")
        sample = data.first(1)
        _check_batch(data, sample, inputs)
        _check_target(data, sample)
        _check_all_feeds(data, inputs)
        # Refuse token ids beyond the model's vocabulary.
        for name, rows in (limits or {}).items():
            indices = sample[name]
            wrong = indices[(indices < -rows) | (indices >= rows)]
            if wrong.size:
                raise DataError(
                    f"{data.role} data, input {name!r}",
                    f"holds {wrong.flat[0]}, and the model's table has {rows} rows",
                    "use the tokenizer that belongs to the model",
                )
        fixed = None if data.feeds else fixed_batch(inputs)
        if fixed is not None:
            # Refuse batches, including the last, that differ from the model's fixed batch.
            if data.batch != fixed:
                raise SpecError(
                    f"data.{data.role}.batch",
                    f"is {data.batch}, and the model takes {fixed} samples at a time",
                    f"set batch: {fixed}",
                )
            samples = info.samples  # those of a function are counted
            if samples is None:
                samples = sum(map(samples_in, data.source.batches(fixed)))
            if samples % fixed:
                whole = samples - samples % fixed
                raise SpecError(
                    f"{data.role} data",
                    f"has {samples} samples, and the model takes {fixed} at a time",
                    f"set samples: {whole}" if whole else f"give at least {fixed} samples",
                )
    return sample


def _check_batch(data: Data, sample: Batch, inputs: Sequence[TensorSpec]) -> None:
    single = None if data.feeds else unstackable(inputs, data.batch)
    if single is not None:
        raise SpecError(
            f"{data.role} data",
            f"cannot be stacked: the model's input {single} does not begin with an axis for "
            "samples",
            "leave out data.training and the passes that train, which need batches"
            if data.role == "training"
            else "add samples: feeds, and give each sample as a whole feed, in a file of a folder",
        )
    for spec in inputs:
        if spec.name not in sample:
            remedy = f"map it under inputs: {suggestion(spec.name, sample)}"
            if data.feeds:
                remedy = "put it into every feed, or name the output that it comes from under state"
            raise DataError(
                f"{data.role} data",
                f"has no array for the model's input {spec.name!r}",
                remedy,
            )
        array = sample[spec.name]
        fixed = isinstance(spec.shape[0], int) if spec.shape and not data.feeds else False
        aligned = fixed and len(array.shape) == len(spec.shape)
        shape = (spec.shape[0], *array.shape[1:]) if aligned else array.shape
        problem = spec.mismatch(tuple(int(d or 0) for d in shape), array.dtype.name)
        if problem:
            remedy = _misfit(spec, array) if data.feeds else _converted(data, spec)
            raise DataError(f"{data.role} data, input {spec.name!r}", problem, remedy)


def _check_all_feeds(data: Data, inputs: Sequence[TensorSpec]) -> None:
    """Check the shapes in all files of a folder, which need not be alike."""
    if not isinstance(data.source, FeedFolder):  # nothing is known before it is read
        return
    for name, form in data.source.forms():
        try:
            _check_batch(
                data, form if data.recurrence is None else data.recurrence.first(form), inputs
            )
        except DataError as error:
            raise DataError(f"{name} of {error.subject}", error.problem, error.remedy) from error


def _check_target(data: Data, first: Batch) -> None:
    batch = first if data.recurrence is None else next(data.batches(1))
    if data.target is not None and answers(batch, data.target) is None:
        raise DataError(
            f"{data.role} data",
            f"has no target {data.target!r} after its transform",
            "let the transform pass it on",
        )


def _converted(data: Data, spec: TensorSpec) -> str:
    """Return the remedy for an array that is not what an input takes."""
    source = data.source.source if isinstance(data.source, Fold) else data.source
    keys = source.misfit(spec) if isinstance(source, PathSource) else ""
    return keys or _in_transform(spec)


def _misfit(spec: TensorSpec, array: Array) -> str:
    """Return the remedy for an array of a feed that is not what an input takes."""
    if array.dtype.name == spec.dtype and not spec.shape:
        return f"save it as a single number: numpy.{spec.dtype}(...)"
    if array.dtype.name == spec.dtype and array.ndim == len(spec.shape) + 1:
        return "save each of its rows as a feed of its own; only with state are they steps"
    return f"save it as the model takes it, or {_in_transform(spec)}"


def _in_transform(spec: TensorSpec) -> str:
    # numpy has no such type; a package that comes with ours has.
    how = " (array.astype(ml_dtypes.bfloat16))" if spec.dtype == "bfloat16" else ""
    return f"convert it in a transform{how}"
