"""Export to safetensors: a model that ``compressor.load`` opens without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir
import torch

from compressor.carriers.torch_graph import GraphModule
from compressor.carriers.torch_graph.dtypes import TORCH_DTYPES
from compressor.errors import ArtifactError, InputError, ModelError, SpecError
from compressor.graph.as_json import Skeleton, graph_as_json, skeleton
from compressor.graph.values import tensor_spec
from compressor.loading import DESCRIPTION, FORMAT, SCHEMA, STORED, WEIGHTS, load
from compressor.types.carrier import Capability, Carrier
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.tensors import TensorSpec
from exporters.safetensors import container
from exporters.safetensors.runner import TorchRunner

_USUAL = ExportContext(name="a-name-of-usual-length", spec_digest="0" * 64)


class SafetensorsExporter(Exporter):
    """Writes ``model.safetensors`` with all weights, and ``model.json`` with the graph."""

    format: ClassVar[str] = "safetensors"

    @property
    def not_judged(self) -> str:
        """A device loads it and runs something else."""
        return "a storage format"

    def check(self, carrier: Carrier) -> None:
        """Raise where the model could not be loaded again.

        Raises:
            SpecError: the carrier has no graph, or an operator or element type cannot be run by
                ``compressor.load``.
        """
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                f"export {self.format}",
                f"needs a graph, a {carrier.kind} model has none",
                "give model.factory or model.onnx",
            )
        parts = skeleton(carrier.graph())
        for name, tensor in parts.tensors.items():
            if tensor.dtype not in STORED:
                raise SpecError(
                    f"tensor {name!r}",
                    f"is {tensor.dtype.name.lower()}, which safetensors does not hold",
                    "cast it to another type, or leave out this export",
                )
        empty = {
            name: torch.empty(
                [int(d) for d in tensor.shape.numpy()],
                dtype=TORCH_DTYPES[tensor.dtype],
                device="meta",
            )
            for name, tensor in parts.tensors.items()
        }
        try:
            GraphModule(ir.from_proto(parts.proto), empty)
        except ModelError as error:
            raise SpecError(error.subject, error.problem, "leave out this export") from error

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of both files; no weight is evaluated."""
        parts = skeleton(carrier.graph())
        size = sum(tensor.nbytes for tensor in parts.tensors.values())
        head = container.header(parts.tensors, _metadata(_USUAL))
        return size + len(head) + len(_description(carrier, parts))

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write both files and open them.

        Raises:
            ArtifactError: they cannot be opened again.
        """
        parts = skeleton(carrier.graph())
        weights, description = directory / WEIGHTS, directory / DESCRIPTION
        container.write(weights, parts.tensors, _metadata(context))
        description.write_bytes(_description(carrier, parts))
        self._load(description)
        return weights, description

    def open(self, path: Path) -> TorchRunner:
        """Load the model with ``compressor.load``.

        Args:
            path: the directory, or one of the files in it.

        Raises:
            ArtifactError: it cannot be loaded.
        """
        return TorchRunner(self._load(path if path.is_dir() else path.with_name(DESCRIPTION)))

    def _load(self, path: Path) -> torch.nn.Module:
        try:
            return load(path)
        except InputError as error:
            raise ArtifactError(error.subject, error.problem, error.remedy) from error


def _metadata(context: ExportContext) -> dict[str, str]:
    return {"format": FORMAT, "name": context.name}


def _description(carrier: Carrier, parts: Skeleton) -> bytes:
    graph = carrier.graph().graph
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "inputs": [_spec(tensor_spec(value)) for value in graph.inputs],
        "outputs": [_spec(tensor_spec(value)) for value in graph.outputs],
        "weights": WEIGHTS,
        "tensors": {
            name: container.entry_of(tensor).as_json() for name, tensor in parts.tensors.items()
        },
        "graph": graph_as_json(parts.proto),
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode() + b"\n"


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
