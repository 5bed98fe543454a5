"""Export to safetensors: a model that ``compressor.load`` or ``transformers`` opens, no pickle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import ArtifactError, InputError, ModelError, SpecError
from compressor.exporters.safetensors.finishing import check_written, finish
from compressor.exporters.safetensors.graph_files import GraphPlan, plan_graph, write_graph
from compressor.exporters.safetensors.stream_plan import StreamPlan, plan_stream
from compressor.exporters.safetensors.streaming import write_shards
from compressor.exporters.safetensors.transformers_runner import TransformersRunner
from compressor.graph.skeleton import skeleton
from compressor.models.codec import DESCRIPTION, RuntimeModule, check, check_graph, load
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.torch.matching import TorchRunner
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import ExportContext, Exporter

_USUAL = ExportContext(name="a-name-of-usual-length", spec_digest="0" * 64)


class SafetensorsExporter(Exporter):
    """Writes weights as safetensors, in one of two layouts.

    ``graph``: ``model.safetensors`` with all weights (or shards and their index) and
    ``model.json`` with the graph; ``compressor.load`` opens it. Codes of 4, 3 and 2 bits are
    packed, and weights with many zeros stored as sparse. ``compressed-tensors``: shards, their
    index, ``config.json`` and the tokenizer's files; ``transformers`` and vLLM open it. The latter
    is streamed, so the model may be larger than memory.
    """

    format: ClassVar[str] = "safetensors"
    resumes: ClassVar[bool] = True
    version: ClassVar[int] = 2

    layout: Literal["auto", "graph", "compressed-tensors"] = Field(
        default="auto",
        description="graph: for compressor.load; compressed-tensors: a Hugging Face folder; "
        "auto: graph where the model has one, compressed-tensors otherwise",
    )
    max_shard_size: int | None = Field(
        default=None,
        ge=1,
        description="bytes of a file of weights at most; if not given, graph writes one file, and "
        "compressed-tensors keeps the input's shards, or 5 GB where it has none",
    )
    sparse: Literal["auto", "never"] = Field(
        default="auto",
        description="layout graph: auto leaves zeros out of weights that become a tenth smaller by "
        "it, so that the predicted size is the most it may be; never stores all elements",
    )

    @property
    def targets(self) -> frozenset[str]:
        """The layout for others, where it is asked for: it holds linear layers only."""
        return frozenset({self.layout} if self.layout == "compressed-tensors" else ())

    @property
    def bound(self) -> bool:
        """Which weights have many zeros is known once they are read."""
        return self.sparse == "auto" and self.layout != "compressed-tensors"

    @property
    def not_judged(self) -> str:
        """A device loads it and runs something else."""
        return "a storage format"

    def check(self, carrier: Carrier) -> None:
        """Raise where the model could not be loaded again.

        Raises:
            SpecError: the layout needs a graph and the carrier has none, an operator or element
                type cannot be run by ``compressor.load``, or compressed-tensors has no form for a
                layer.
        """
        if self._streams(carrier):
            self._plan(carrier)
            return
        if Capability.GRAPH not in carrier.offers:
            raise SpecError(
                f"export {self.format}",
                f"needs a graph, a {carrier.kind} model has none",
                "give model.factory or model.onnx, or layout: compressed-tensors",
            )
        parts = self._plan_graph(carrier, _USUAL).parts
        empty = {
            name: torch.empty(
                [int(d) for d in tensor.shape.numpy()],
                dtype=TORCH_DTYPES[tensor.dtype],
                device="meta",
            )
            for name, tensor in parts.tensors.items()
        }
        try:
            check_graph(ir.from_proto(parts.proto), empty)
        except ModelError as error:
            raise SpecError(error.subject, error.problem, "leave out this export") from error

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of all files; no weight is evaluated.

        Weights of which zeros are left out count in full: whether they have zeros is known once
        they are written.
        """
        if self._streams(carrier):
            return self._plan(carrier).nbytes
        return self._plan_graph(carrier, _USUAL).nbytes

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write all files and open them.

        Several processes share the shards of a streamed model; the first returns the files.

        Raises:
            ArtifactError: they cannot be opened again.
            InputError: the disk is full.
            ModelError: an input file has changed, or a weight holds NaN or infinity.
        """
        if self._streams(carrier):
            return self._write_stream(carrier, directory, context)
        if context.ranks.rank:
            return ()
        files = write_graph(self._plan_graph(carrier, context), directory)
        with _unusable():
            check(directory)
        return files

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare a streamed artifact's headers and a sample of its tensors with the model.

        Raises:
            ArtifactError: they differ.
        """
        return check_written(self._plan(carrier), path.parent)

    def open(self, path: Path) -> Runner:
        """Load the model with ``compressor.load``, or with ``transformers``.

        Args:
            path: the directory, or one of the files in it.

        Raises:
            ArtifactError: it cannot be loaded.
        """
        folder = path if path.is_dir() else path.parent
        if not (folder / DESCRIPTION).is_file():
            return TransformersRunner(folder)
        with _unusable(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the report names the runtime
            module = load(folder)
        return module.runner if isinstance(module, RuntimeModule) else TorchRunner(module)

    def _streams(self, carrier: Carrier) -> bool:
        if self.layout == "auto":
            return Capability.GRAPH not in carrier.offers
        return self.layout == "compressed-tensors"

    def _plan_graph(self, carrier: Carrier, context: ExportContext) -> GraphPlan:
        model = carrier.graph()
        parts = skeleton(model, narrowed=True)
        sparse = self.sparse == "auto"
        return plan_graph(model, parts, context.name, sparse, self.max_shard_size)

    def _plan(self, carrier: Carrier, key: str = "") -> StreamPlan:
        return plan_stream(carrier, key, self.max_shard_size)

    def _write_stream(
        self, carrier: Carrier, directory: Path, context: ExportContext
    ) -> tuple[Path, ...]:
        plan = self._plan(carrier, context.spec_digest)
        write_shards(plan, directory, context.ranks, advance=context.advance)
        context.ranks.wait()
        if context.ranks.rank:
            return ()
        written = finish(plan, directory)
        for file in written:
            context.hashed(file.path.relative_to(directory).as_posix(), file.sha256)
        return tuple(file.path for file in written)


@contextmanager
def _unusable() -> Iterator[None]:
    """Say of a model that was written and cannot be loaded that the artifact failed."""
    try:
        yield
    except InputError as error:
        raise ArtifactError(error.subject, error.problem, error.remedy) from error
