"""Optimization profiles: the sizes of dynamic dimensions that an engine is built for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import onnx_ir as ir
from onnx_ir import DataType
from pydantic import Field

from compressor.errors import SpecError, suggestion
from compressor.exporters.onnx.targets import Owners, value_type
from compressor.graph.values import all_nodes
from compressor.types.options import Options
from compressor.types.tensors import TensorSpec

Length = Annotated[int, Field(ge=1)]
_SUBJECT = "export tensorrt"
_TITLES: Mapping[DataType, str] = {
    DataType.BFLOAT16: "bfloat16",
    DataType.INT4: "int4",
    DataType.FLOAT8E4M3FN: "fp8",
    DataType.FLOAT4E2M1: "fp4",
}

_FIRST: Mapping[DataType, tuple[int, int]] = {
    DataType.BFLOAT16: (8, 0),
    DataType.INT4: (8, 0),
    DataType.FLOAT8E4M3FN: (8, 9),
    DataType.FLOAT4E2M1: (10, 0),
}
"""The lowest compute capability whose GPUs have the type; others are in all of TensorRT's.

Measured with TensorRT-RTX 1.7, which builds for 7.5, 8.0, 8.6, 8.9, 12.0 and 12.1; 10.0 for fp4 is
from NVIDIA's support matrix.
"""


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


def resolve_profiles(
    inputs: Sequence[TensorSpec], ranges: Mapping[str, ShapeRange], batch: BatchRange | None
) -> dict[str, ShapeRange]:
    """Return the profile of every input with a dynamic dimension.

    Args:
        ranges: the shapes that the spec gives for single inputs.
        batch: the batch sizes that it gives for all others.

    Raises:
        SpecError: an input has none, or one that does not fit it.
    """
    named = {spec.name: spec for spec in inputs}
    for name in ranges:
        if name not in named:
            raise SpecError(
                f"{_SUBJECT}: profile {name!r}",
                "names no input of the model",
                suggestion(name, named),
            )
    profiles: dict[str, ShapeRange] = {}
    for spec in inputs:
        if spec.name in ranges:
            profiles[spec.name] = ranges[spec.name]
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
) -> ShapeRange:
    if batch is None or dynamic_axes(spec) != (0,):
        raise SpecError(
            f"{_SUBJECT}: input {spec.name!r}",
            f"has dynamic dimensions ({_shown(spec)}) and no profile",
            f"add {_example(inputs)}",
        )
    rest = tuple(int(length or 0) for length in spec.shape[1:])
    low, best, high = ((length, *rest) for length in (batch.min, batch.opt, batch.max))
    return ShapeRange.model_construct(min=low, opt=best, max=high)  # a fixed length may be 0


def _check(spec: TensorSpec, profile: ShapeRange) -> None:
    subject = f"{_SUBJECT}: profile {spec.name!r}"
    for word, shape in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
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
                f"dimension {axis} has min {lengths[0]}, opt {lengths[1]} and max {lengths[2]}",
                "order them so that min <= opt <= max",
            )


def _check_names(inputs: Sequence[TensorSpec], profiles: Mapping[str, ShapeRange]) -> None:
    """Check that dimensions of the same name have the same sizes."""
    by_dimension: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for spec in inputs:
        profile = profiles[spec.name]
        for name, *lengths in zip(spec.shape, profile.min, profile.opt, profile.max, strict=True):
            if not isinstance(name, str):
                continue
            low, best, high = lengths
            other, have = by_dimension.setdefault(name, (spec.name, (low, best, high)))
            if have != (low, best, high):
                raise SpecError(
                    f"{_SUBJECT}: profile {spec.name!r}",
                    f"gives dimension {name!r} {low}, {best}, {high}; input {other!r} gives it "
                    f"{have[0]}, {have[1]}, {have[2]}",
                    "write the same numbers in both",
                )


def _example(inputs: Sequence[TensorSpec]) -> str:
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


def _shown(spec: TensorSpec) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in spec.shape)}]"


def check_known(targets: Sequence[str], capabilities: Sequence[str], builder: str) -> None:
    """Check that a builder knows all compute capabilities.

    Raises:
        SpecError: naming the first that it does not know, and those that it does.
    """
    for target in targets:
        if target not in capabilities:
            raise SpecError(
                "compute-capability",
                f"{target!r} is not one that builder {builder!r} builds for",
                f"choose from {', '.join(capabilities)}",
            )


def check_types(model: ir.Model, targets: Sequence[str], capabilities: Sequence[str]) -> None:
    """Check that the targets' GPUs have all element types of the graph.

    Args:
        targets: compute capabilities, such as ``8.6``.

    Raises:
        SpecError: naming the layer or node, the type, and the capabilities that have it.
    """
    for node, dtype in _typed(model):
        lacking = [target for target in targets if _number(target) < _FIRST[dtype]]
        if not lacking:
            continue
        able = [other for other in capabilities if _number(other) >= _FIRST[dtype]]
        raise SpecError(
            Owners(model).subject(node),
            f"is {_TITLES[dtype]}, which GPUs of compute capability {', '.join(lacking)} do not "
            "support",
            (f"build for {', '.join(able)}" if able else "use another builder")
            + ", or choose another type",
        )


def _typed(model: ir.Model) -> Iterator[tuple[ir.Node, DataType]]:
    """Yield the nodes that read or give a type that not all GPUs have."""
    for node in all_nodes(model.graph):
        for value in (*node.inputs, *node.outputs):
            dtype = None if value is None else value_type(value)
            if dtype is not None and dtype in _FIRST:
                yield node, dtype


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)
