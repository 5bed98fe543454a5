"""Which arrays a source takes from a file, checked by their headers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.errors import DataError
from compressor.types.data import SourceInfo
from compressor.types.tensors import TensorSpec


@dataclass(frozen=True)
class Header:
    """What is known of an array before it is read.

    Attributes:
        shape: its axes, samples first.
        dtype: as stored, in either byte order.
        fortran: whether the first axis varies fastest in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the array's data."""
        size = self.dtype.itemsize
        for axis in self.shape:  # not numpy's product, which overflows
            size *= axis
        return size


def choose(
    subject: str, fields: Mapping[str, str], headers: Mapping[str, Header]
) -> dict[str, str]:
    """Return ``fields``, model names to stored names, or all arrays under their own names.

    Raises:
        DataError: an array is missing, or there are none at all.
    """
    if not headers:
        raise DataError(subject, "holds no arrays", "save named arrays, samples first")
    for stored in fields.values():
        if stored not in headers:
            close = difflib.get_close_matches(stored, headers, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                subject,
                f"has no array {stored!r}",
                f"{hint}it has {', '.join(map(repr, sorted(headers)))}",
            )
    return dict(fields) or {name: name for name in headers}


def describe(
    subject: str, chosen: Mapping[str, str], headers: Mapping[str, Header], most: int | None
) -> SourceInfo:
    """Return the description of the chosen arrays, of which at most ``most`` samples are used.

    Raises:
        DataError: an array is not numeric, is a scalar or empty, or lengths differ.
    """
    for stored in chosen.values():
        _check(subject, stored, headers[stored])
    lengths = {stored: headers[stored].shape[0] for stored in chosen.values()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{stored!r} {length}" for stored, length in lengths.items())
        raise DataError(
            subject,
            f"its arrays have different lengths: {listed}",
            "save as many rows of each, one for each sample",
        )
    available = next(iter(lengths.values()))
    specs = tuple(
        TensorSpec(name, ("batch", *headers[stored].shape[1:]), native(headers[stored].dtype).name)
        for name, stored in chosen.items()
    )
    return SourceInfo(available if most is None else min(most, available), specs)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in this machine's byte order."""
    return dtype.newbyteorder("=")


def _check(subject: str, stored: str, header: Header) -> None:
    if header.dtype.hasobject:
        raise DataError(
            subject,
            f"array {stored!r} holds Python objects, which only pickle can load",
            "save it with a numeric dtype (pickles can run code, so they are never loaded)",
        )
    if header.dtype.kind not in "biuf":
        raise DataError(
            subject,
            f"array {stored!r} has dtype {header.dtype}",
            "save it as bool, integers or floats (bfloat16 as float32)",
        )
    if not header.shape:
        raise DataError(
            subject, f"array {stored!r} is a single number", "save an array, samples first"
        )
    if 0 in header.shape:
        raise DataError(
            subject,
            f"array {stored!r} is empty, with shape {list(header.shape)}",
            "save at least one sample",
        )
