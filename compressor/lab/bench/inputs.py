"""Inputs for timing artifacts: as declared by the artifacts, with random or given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from compressor.calibration.sources.arrays import NpzSource
from compressor.errors import DataError, SpecError
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, tensor_spec
from compressor.models.codec.forms import DESCRIPTION
from compressor.models.codec.load import packed_format
from compressor.models.codec.reading import read_description
from compressor.models.executorch import ExecutorchRunner
from compressor.models.litert import LitertRunner
from compressor.models.onnx.file import read_onnx
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.onnx.runtimes import OpenVinoRunner
from compressor.run.artifact_file import ONNX, ArtifactFile, Machinery
from compressor.run.evaluate import made_up_batch
from compressor.types.tensors import Array, Batch, TensorSpec, may_agree

MOST_INPUTS = 64
_IMAGE_AXES, _SIDE = 4, 224  # of an example
_TOKENS = TensorSpec("input_ids", ("batch", "sequence"), "int64")


@dataclass(frozen=True)
class Declared:
    """What an artifact says of itself.

    Attributes:
        inputs: what it takes; ``None`` where its format does not say.
        branches: its time may depend on the values of its inputs.
    """

    inputs: tuple[TensorSpec, ...] | None
    branches: bool = False


def declared(artifact: ArtifactFile) -> Declared:
    """Read what an artifact takes; only formats of runtimes themselves are opened for it.

    Raises:
        ModelError: a file is damaged.
    """
    if artifact.format == ONNX:
        return _of_graph(read_onnx(artifact.path))
    if artifact.format in ("ort", "openvino", "litert", "executorch"):
        runner = artifact.opener(Machinery())()
        assert isinstance(runner, OrtRunner | OpenVinoRunner | LitertRunner | ExecutorchRunner)
        return Declared(runner.inputs)
    packed = packed_format(artifact.path)
    if packed is not None:
        with packed.unpacked(artifact.path) as content:
            return _of_graph(read_description(content / DESCRIPTION).model())
    folder = artifact.path if artifact.path.is_dir() else artifact.path.parent
    if (folder / DESCRIPTION).is_file():
        return _of_graph(read_description(folder / DESCRIPTION).model())
    return Declared((_TOKENS,) if (folder / "config.json").is_file() else None)


def _of_graph(model: ir.Model) -> Declared:
    inputs = [v for v in model.graph.inputs if not v.is_initializer()]
    branches = any(operator(node).branches for node in all_nodes(model.graph))
    return Declared(tuple(tensor_spec(value) for value in inputs), branches)


def agreed(takes: Mapping[str, tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """Return the inputs that all artifacts take; a length that one of them fixes is fixed.

    Args:
        takes: inputs by the artifact's name; the first is what others are compared with.

    Raises:
        SpecError: they take other inputs, so that their times cannot be compared.
    """
    first, *others = takes
    common = {spec.name: spec for spec in takes[first]}
    for name in others:
        specs = {spec.name: spec for spec in takes[name]}
        for key in specs.keys() | common.keys():
            if key not in specs or key not in common or not common[key].fits(specs[key]):
                raise SpecError(
                    f"artifact {name!r}",
                    f"takes {_listed(takes[name])}, and {first!r} takes {_listed(takes[first])}",
                    "compare artifacts of one model",
                )
            common[key] = replace(common[key], shape=_narrowed(common[key], specs[key]))
    return tuple(common.values())


def undeclared(name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[TensorSpec, ...]:
    """Return float32 inputs of given shapes, for formats that do not declare their inputs.

    Raises:
        SpecError: no shape is given.
    """
    if not shapes:
        raise SpecError(
            f"artifact {name!r}",
            "does not say which inputs it takes",
            "give --shape NAME=1,3,224,224 for each, or time it beside the ONNX file it is made of",
        )
    return tuple(TensorSpec(n, ("batch", *shape[1:]), "float32") for n, shape in shapes.items())


def fixed_shapes(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]
) -> tuple[TensorSpec, ...]:
    """Return the inputs with a length for each axis, except where the first one is the batch.

    Args:
        shapes: shapes by name; where the first axis is dynamic, its length stays free.

    Raises:
        SpecError: a length is missing or contradicts the declaration.
    """
    return tuple(_fixed(s, shapes.get(s.name)) for s in partly_fixed(inputs, shapes))


def partly_fixed(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]
) -> tuple[TensorSpec, ...]:
    """Return the inputs with the lengths that are given, where data have the others.

    Raises:
        SpecError: a length contradicts the declaration, or there is no such input.
    """
    for name in shapes:
        if name not in {spec.name for spec in inputs}:
            raise SpecError(f"--shape {name}", "is not an input", f"inputs are: {_listed(inputs)}")
    return tuple(_fixed(s, shapes[s.name]) if s.name in shapes else s for s in inputs)


def batch_sizes(inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the batch sizes to time: those that are wanted, 1 if none are, or the fixed one.

    Raises:
        SpecError: the artifacts take another batch only.
    """
    fixed = [d for spec in inputs for d in spec.shape[:1] if isinstance(d, int)]
    free = any(isinstance(d, str) for spec in inputs for d in spec.shape[:1])
    if free or not fixed:
        return tuple(dict.fromkeys(sizes)) or (1,)
    other = [size for size in sizes if size != fixed[0]]
    if other:
        raise SpecError(
            f"--batch {other[0]}",
            f"is not what the artifacts take: {_listed(inputs)}",
            f"leave it out, or export with a dynamic first axis; theirs is {fixed[0]}",
        )
    return (fixed[0],)


def random_inputs(inputs: Sequence[TensorSpec], size: int) -> list[Batch]:
    """Return one batch of random values: normal floats, integers 0 and 1; the same ones always."""
    return [made_up_batch([_sized(spec, size) for spec in inputs], size, seed=0)]


def stored_inputs(
    path: Path, inputs: Sequence[TensorSpec], size: int, *, several: bool
) -> list[Batch]:
    """Return batches of samples from a file.

    Args:
        path: an ``.npz`` file with an array ``[samples, ...]`` for each input, by its name.
        size: samples in a batch; the file's are repeated where they are fewer.
        several: as many batches as there are, up to 64; otherwise the first.

    Raises:
        SpecError: there is no such file, or it lacks an input.
        DataError: it is damaged or empty, or an array has another shape or dtype.
    """
    count = MOST_INPUTS if several else 1
    arrays = _arrays(path, inputs, size, count * size)
    count = max(1, len(next(iter(arrays.values()))) // size)
    taken = {name: np.resize(a, (max(len(a), size), *a.shape[1:])) for name, a in arrays.items()}
    return [{n: a[i * size : (i + 1) * size] for n, a in taken.items()} for i in range(count)]


def stored_feed(path: Path, inputs: Sequence[TensorSpec], size: int | None) -> Batch:
    """Return a whole feed from a file.

    Args:
        path: an ``.npz`` file with an array for each input, by its name.
        size: what open first axes must have; ``None`` for any.

    Raises:
        SpecError: there is no such file, or it lacks an input.
        DataError: it is damaged, or an array has another shape or dtype.
    """
    feed = _npz(path, inputs).feed()
    for spec in inputs:
        wanted = spec if size is None else _sized(spec, size)
        _check(path, wanted, feed[spec.name].shape, feed[spec.name])
    return feed


def _narrowed(first: TensorSpec, second: TensorSpec) -> tuple[int | str | None, ...]:
    return tuple(
        b if isinstance(b, int) else a for a, b in zip(first.shape, second.shape, strict=True)
    )


def _fixed(spec: TensorSpec, shape: Sequence[int] | None) -> TensorSpec:
    option = f"--shape {spec.name}={','.join(map(str, _example(spec.shape)))}"
    if not hasattr(torch, spec.dtype):
        raise SpecError(
            f"input {spec.name!r}", f"is of type {spec.dtype}", "time a model that takes numbers"
        )
    if shape is None:
        missing = [d for d in spec.shape[1:] if not isinstance(d, int)]
        if missing:
            remedy = f"give {option}, or --data FILE.npz"
            raise SpecError(f"input {spec}", "has an unknown length", remedy)
        shape = [d if isinstance(d, int) else 1 for d in spec.shape]
    if not may_agree(spec.shape, shape):
        shown = ",".join(str(d) for d in shape)
        problem = f"does not fit {spec}"
        if len(shape) != len(spec.shape):
            problem = f"has {len(shape)} lengths, and {spec} takes {len(spec.shape)}, samples first"
        raise SpecError(f"--shape {spec.name}={shown}", problem, f"give {option}")
    free = spec.shape and not isinstance(spec.shape[0], int)
    return replace(spec, shape=("batch", *shape[1:]) if free else tuple(shape))


def _example(shape: Sequence[int | str | None]) -> list[int]:
    """Return lengths that an input may have: of sides of images 224, of other open axes 1."""
    open_side = _SIDE if len(shape) == _IMAGE_AXES else 1
    return [d if isinstance(d, int) else open_side if i else 1 for i, d in enumerate(shape)]


def _sized(spec: TensorSpec, size: int) -> TensorSpec:
    first = spec.shape[:1] if spec.shape and isinstance(spec.shape[0], int) else (size,)
    return replace(spec, shape=(*first, *spec.shape[1:])) if spec.shape else spec


def _arrays(path: Path, inputs: Sequence[TensorSpec], size: int, samples: int) -> dict[str, Array]:
    """Read so many samples of each input at most, and check that a model takes them."""
    # It refuses a file without samples.
    arrays = next(_npz(path, inputs).batches(samples, samples))
    for spec in inputs:
        array = arrays[spec.name]
        _check(path, _sized(spec, size), (size, *array.shape[1:]), array)
    return arrays


def _npz(path: Path, inputs: Sequence[TensorSpec]) -> NpzSource:
    return NpzSource(path=path, fields={i.name: i.name for i in inputs})


def _check(path: Path, spec: TensorSpec, shape: tuple[int, ...], array: Array) -> None:
    wrong = spec.mismatch(shape, str(array.dtype))
    if wrong:
        raise DataError(f"data {str(path)!r}", f"array {spec.name!r}: {wrong}", "convert the array")


def _listed(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(spec) for spec in inputs) or "nothing"
