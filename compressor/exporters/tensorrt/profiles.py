"""Optimization profiles: the sizes of dynamic dimensions that an engine is built for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from compressor.errors import SpecError, suggestion
from compressor.types.options import Options
from compressor.types.tensors import TensorSpec

Length = Annotated[int, Field(ge=1)]
_SUBJECT = "export tensorrt"


class ShapeRange(Options):
    """The shapes that one input may have."""

    min: tuple[Length, ...] = Field(description="the smallest shape, all dimensions")
    opt: tuple[Length, ...] = Field(description="the shape that kernels are chosen for")
    max: tuple[Length, ...] = Field(description="the largest shape")


class BatchRange(Options):
    """The sizes that the batch may have, of all inputs alike."""

    min: Length = Field(default=1, description="the smallest batch")
    opt: Length = Field(description="the batch that kernels are chosen for")
    max: Length = Field(description="the largest batch")


@dataclass(frozen=True)
class Profile:
    """The shapes of one input: smallest, best and largest."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


def resolve_profiles(
    inputs: Sequence[TensorSpec], given: Mapping[str, ShapeRange], batch: BatchRange | None
) -> dict[str, Profile]:
    """Return the profile of every input with a dynamic dimension.

    Args:
        inputs: the model's inputs.
        given: what the spec says of single inputs.
        batch: what it says of the batch of all others.

    Raises:
        SpecError: an input has none, or one that does not fit it.
    """
    named = {spec.name: spec for spec in inputs}
    for name in given:
        if name not in named:
            raise SpecError(
                f"{_SUBJECT}: profile {name!r}",
                "is of no input of the model",
                suggestion(name, named),
            )
    profiles: dict[str, Profile] = {}
    for spec in inputs:
        if spec.name in given:
            entry = given[spec.name]
            profiles[spec.name] = Profile(entry.min, entry.opt, entry.max)
        elif dynamic_axes(spec):
            profiles[spec.name] = _from_batch(spec, inputs, batch)
    for name, profile in profiles.items():
        _check(named[name], profile)
    _check_names([named[name] for name in profiles], profiles)
    return profiles


def dynamic_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Return the positions of an input's dynamic dimensions."""
    return tuple(axis for axis, length in enumerate(spec.shape) if not isinstance(length, int))


def _from_batch(
    spec: TensorSpec, inputs: Sequence[TensorSpec], batch: BatchRange | None
) -> Profile:
    if batch is None or dynamic_axes(spec) != (0,):
        raise SpecError(
            f"{_SUBJECT}: input {spec.name!r}",
            f"has dynamic dimensions ({_shown(spec)}) and no profile",
            f"add {_example(inputs)}",
        )
    rest = tuple(int(length or 0) for length in spec.shape[1:])
    return Profile((batch.min, *rest), (batch.opt, *rest), (batch.max, *rest))


def _check(spec: TensorSpec, profile: Profile) -> None:
    subject = f"{_SUBJECT}: profile {spec.name!r}"
    for word, shape in _shapes(profile):
        if len(shape) != len(spec.shape):
            raise SpecError(
                subject,
                f"{word} has {len(shape)} dimensions, the input has {len(spec.shape)} "
                f"({_shown(spec)})",
                f"write it as {list(_lengths(spec, 1))}",
            )
        for axis, (want, have) in enumerate(zip(spec.shape, shape, strict=True)):
            if isinstance(want, int) and want != have:
                raise SpecError(
                    subject,
                    f"{word} sets dimension {axis} to {have}, which the model fixes to {want}",
                    f"write {want} there",
                )
    for axis, lengths in enumerate(zip(profile.min, profile.opt, profile.max, strict=True)):
        if list(lengths) != sorted(lengths):
            raise SpecError(
                subject,
                f"dimension {axis} goes from {lengths[0]} over {lengths[1]} to {lengths[2]}",
                "order it so that min <= opt <= max",
            )


def _check_names(inputs: Sequence[TensorSpec], profiles: Mapping[str, Profile]) -> None:
    """Dimensions of one name are one number when the model runs."""
    known: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for spec in inputs:
        own = profiles[spec.name]
        for name, *lengths in zip(spec.shape, own.min, own.opt, own.max, strict=True):
            if not isinstance(name, str):
                continue
            low, best, high = lengths
            other, have = known.setdefault(name, (spec.name, (low, best, high)))
            if have != (low, best, high):
                raise SpecError(
                    f"{_SUBJECT}: profile {spec.name!r}",
                    f"gives dimension {name!r} {low}, {best}, {high}; input {other!r} gives it "
                    f"{have[0]}, {have[1]}, {have[2]}",
                    "write the same numbers in both",
                )


def _example(inputs: Sequence[TensorSpec]) -> str:
    """Return the lines to add for all inputs."""
    dynamic = [spec for spec in inputs if dynamic_axes(spec)]
    if all(dynamic_axes(spec) == (0,) for spec in dynamic):
        return "batch: {min: 1, opt: 8, max: 64}"
    entries = ", ".join(
        f"{spec.name}: {{min: {list(_lengths(spec, 1))}, opt: {list(_lengths(spec, 8))}, "
        f"max: {list(_lengths(spec, 64))}}}"
        for spec in dynamic
    )
    return f"profiles: {{{entries}}}, with the sizes that you need"


def _lengths(spec: TensorSpec, dynamic: int) -> Iterator[int]:
    return (length if isinstance(length, int) else dynamic for length in spec.shape)


def _shapes(profile: Profile) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from (("min", profile.min), ("opt", profile.opt), ("max", profile.max))


def _shown(spec: TensorSpec) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in spec.shape)}]"
