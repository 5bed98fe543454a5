"""Open what a roofline is drawn of: a graph, something to run, and inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.errors import InputError, SpecError
from compressor.graph.values import all_nodes, tensor_spec
from compressor.inspection.run_output import MANIFEST
from compressor.models.onnx.file import read_onnx
from compressor.run.evaluate import made_up_batch
from compressor.run.model import open_model
from compressor.spec.load import load_spec
from compressor.types.carrier import Capability
from compressor.types.tensors import Batch, TensorSpec

_SPECS = (".yaml", ".yml")
_IMAGE_RANK, _FIRST_SPATIAL = 4, 2
_SEED = 0


@dataclass(frozen=True)
class MeasuredModel:
    """A model that can be timed.

    Attributes:
        subject: what it is, for messages.
        graph: its nodes and weights.
        file: the same as an ONNX file.
        inputs: what it takes.
    """

    subject: str
    graph: ir.Model
    file: Path
    inputs: tuple[TensorSpec, ...]


@contextmanager
def measured_model(path: Path) -> Iterator[MeasuredModel]:
    """Open an ONNX file, the ONNX file of a run's output folder, or the model of a spec.

    Raises:
        SpecError: there is nothing, or no graph.
        ModelError: a file is unusable.
    """
    subject = f"path {str(path)!r}"
    if not path.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    if path.suffix in _SPECS:
        with tempfile.TemporaryDirectory() as folder:
            yield _of_spec(path, Path(folder))
        return
    if path.is_dir() and (path / MANIFEST).is_file():
        files = sorted(path.glob("*.onnx"))
        if not files:
            raise SpecError(
                subject,
                "holds no ONNX file, and a roofline needs a graph that is run",
                "add the export onnx to the spec, or name the spec for its float model",
            )
        path = files[0]
    if path.suffix != ".onnx":
        raise SpecError(
            subject,
            "has no graph that says how its weights are used",
            "name an ONNX file, a run's output folder, or a spec with model.factory",
        )
    graph = read_onnx(path)
    inputs = tuple(tensor_spec(v) for v in graph.graph.inputs if not v.is_initializer())
    subject = f"model {str(path)!r}"
    if all(node.name for node in all_nodes(graph.graph)):
        yield MeasuredModel(subject, graph, path, inputs)
        return
    with tempfile.TemporaryDirectory() as folder:  # what has no name cannot be found in a profile
        common.NameFixPass()(graph)
        yield MeasuredModel(subject, graph, _saved(graph, Path(folder)), inputs)


def _saved(graph: ir.Model, folder: Path) -> Path:
    file = folder / "model.onnx"
    ir.save(graph, file, external_data=f"{file.name}.data")
    return file


def _of_spec(path: Path, folder: Path) -> MeasuredModel:
    spec = load_spec(path)
    opened = open_model(spec)
    if not {Capability.GRAPH, Capability.RUN} <= opened.carrier.offers:
        raise SpecError(
            f"spec {str(path)!r}",
            "names a bare checkpoint, which does not say how its weights are used",
            "give model.factory or model.onnx",
            where=spec.where("model"),
        )
    opened.load()
    graph = opened.carrier.graph()
    subject = f"the model of {str(path)!r}"
    return MeasuredModel(subject, graph, _saved(graph, folder), opened.carrier.inputs)


def inputs_for(model: MeasuredModel, batch: int | None, length: int) -> Batch:
    """Make inputs up; times of the usual operators do not depend on what is in them.

    Args:
        model: what takes them.
        batch: samples; ``None`` for one, or what the model fixes.
        length: of other dynamic axes.

    Raises:
        SpecError: the model takes another number of samples.
    """
    specs = [_fixed(spec, model.inputs, batch or 1, length) for spec in model.inputs]
    if not specs:
        raise InputError(model.subject, "takes no input", "name a model that does")
    fixed = model.inputs[0].shape[0] if model.inputs[0].shape else None
    if batch is not None and isinstance(fixed, int) and fixed != batch:
        raise SpecError("--batch", f"is {batch}, and the model takes {fixed}", "leave it out")
    return made_up_batch(specs, batch or 1, _SEED)


def _fixed(spec: TensorSpec, inputs: Sequence[TensorSpec], batch: int, length: int) -> TensorSpec:
    first = inputs[0].shape[0] if inputs[0].shape else None
    shape = []
    for axis, dimension in enumerate(spec.shape):
        image = len(spec.shape) >= _IMAGE_RANK and axis >= _FIRST_SPATIAL
        if isinstance(dimension, int):
            shape.append(dimension)
        elif (axis == 0 and dimension is None) or (dimension is not None and dimension == first):
            shape.append(batch)
        else:
            shape.append(max(length, 224) if image else length)
    return replace(spec, shape=tuple(shape))
