"""Open a spec's data, and check that it fits the model before anything heavy starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from compressor.calibration.sources.user_functions import FactorySource, TransformedSource
from compressor.errors import DataError, SpecError, located, suggestion
from compressor.files import json_sha256
from compressor.spec.load import FACTORY, DataEntry, Spec
from compressor.spec.user_code import code_digest, importable, load_symbol
from compressor.types.data import Source
from compressor.types.tensors import Batch, TensorSpec, fixed_batch

_BATCH = 32


@dataclass(frozen=True)
class Data:
    """One opened data source.

    Attributes:
        role: ``calibration``, ``evaluation`` or ``training``.
        source: where batches come from, transform included.
        target: name of the array with the labels, if there is one.
        code: hash of the user's code that makes or transforms batches.
    """

    role: str
    source: Source
    target: str | None
    batch: int
    code: str
    where: str

    def batches(self, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``batch`` samples, at most ``limit`` samples."""
        return self.source.batches(self.batch, limit)

    def first(self, samples: int) -> Batch:
        """Return the first samples as one batch.

        Raises:
            DataError: there are none.
        """
        for batch in self.source.batches(samples, samples):
            return batch
        raise DataError(f"{self.role} data", "has no samples", "check the source").at(self.where)

    @cached_property
    def samples(self) -> int | None:
        """The number of samples, if known before reading them."""
        return self.source.info().samples

    @cached_property
    def digest(self) -> str:
        """Hash of the content and of the code that transforms it."""
        return json_sha256([self.source.digest(), self.code, self.target])


def open_data(spec: Spec, inputs: Sequence[TensorSpec]) -> dict[str, Data]:
    """Open all data of a spec by its role.

    Args:
        inputs: the model's; where they fix the batch, that is the default.

    Raises:
        SpecError: a function does not import.
        DataError: a file is unusable.
    """
    opened = {}
    for role, entry in spec.data.items():
        with located(entry.where):
            opened[role] = _open(spec, entry, fixed_batch(inputs))
    return opened


def _open(spec: Spec, entry: DataEntry, fixed: int | None) -> Data:
    code = ""
    with importable([spec.folder]):
        if entry.kind == FACTORY:
            assert entry.reference is not None
            make = load_symbol(entry.reference, f"data.{entry.role}.factory")
            fields = dict(entry.keys.inputs)
            if entry.keys.target is not None and fields:
                fields[entry.keys.target] = entry.keys.target
            source: Source = FactorySource(make, entry.reference, fields, entry.keys.samples)
            code += code_digest(make)
        else:
            # The catalog's sources are options that can be read.
            source = cast("Source", entry.options)
        if entry.keys.transform is not None:
            transform = load_symbol(entry.keys.transform, f"data.{entry.role}.transform")
            source = TransformedSource(source, transform, entry.keys.transform, spec.seed)
            code += code_digest(transform)
    size = entry.keys.batch or fixed or _BATCH
    return Data(entry.role, source, entry.keys.target, size, code, entry.where)


def check_data(
    data: Data, inputs: Sequence[TensorSpec], limits: Mapping[str, int] | None = None
) -> None:
    """Read the headers and one sample, and compare them with the model's inputs.

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
        fixed = fixed_batch(inputs)
        if fixed is not None:
            # Refuse batches, including the last, that differ from the model's fixed batch.
            if data.batch != fixed:
                raise SpecError(
                    f"data.{data.role}.batch",
                    f"is {data.batch}, and the model takes {fixed} samples at a time",
                    f"set batch: {fixed}",
                )
            if info.samples is not None and info.samples % fixed:
                whole = info.samples - info.samples % fixed
                raise SpecError(
                    f"{data.role} data",
                    f"has {info.samples} samples, and the model takes {fixed} at a time",
                    f"set samples: {whole}" if whole else f"give at least {fixed} samples",
                )


def _check_batch(data: Data, sample: Mapping[str, object], inputs: Sequence[TensorSpec]) -> None:
    batch: Batch = dict(sample)  # type: ignore[arg-type]  # arrays by the Source protocol
    for spec in inputs:
        if spec.name not in batch:
            raise DataError(
                f"{data.role} data",
                f"has no array for the model's input {spec.name!r}",
                f"map it under inputs: {suggestion(spec.name, batch)}",
            )
        array = batch[spec.name]
        fixed = isinstance(spec.shape[0], int) and len(array.shape) == len(spec.shape)
        shape = (spec.shape[0], *array.shape[1:]) if fixed else array.shape
        problem = spec.mismatch(tuple(int(d or 0) for d in shape), array.dtype.name)
        if problem:
            raise DataError(
                f"{data.role} data, input {spec.name!r}", problem, "convert it in a transform"
            )
    if data.target is not None and data.target not in batch:
        raise DataError(
            f"{data.role} data",
            f"has no target {data.target!r} after its transform",
            "let the transform pass it on",
        )
