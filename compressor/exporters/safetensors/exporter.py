"""Export to safetensors: a model that ``compressor.load`` or ``transformers`` opens, no pickle."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import onnx_ir as ir
import torch
from pydantic import Field

from compressor.errors import ArtifactError, ModelError, SpecError, artifact_errors
from compressor.exporters.safetensors.code_layouts import (
    CODE_LAYOUTS,
    COMPRESSED_TENSORS,
    CodeLayout,
    LayoutName,
    caches_of,
)
from compressor.exporters.safetensors.consumers import (
    Consumer,
    check_consumer,
    lost_experts,
    remark_on,
)
from compressor.exporters.safetensors.proof import prove
from compressor.exporters.safetensors.quantization_config import float_shares
from compressor.exporters.safetensors.stream_plan import (
    PlannedShard,
    StreamPlan,
    finish,
    plan_stream,
)
from compressor.exporters.safetensors.streaming import block_tensors, pieces, write_shards
from compressor.exporters.safetensors.transformers_runner import TransformersRunner
from compressor.graph.skeleton import skeleton
from compressor.models.codec.forms import DESCRIPTION
from compressor.models.codec.headers import read_header
from compressor.models.codec.load import check, check_graph, load
from compressor.models.codec.writing import GraphPlan
from compressor.models.onnx.module import RuntimeModule
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import TorchRunner
from compressor.models.torch.smaller_module import without_data
from compressor.models.transformers.config import OR_GRAPH
from compressor.models.transformers.networks import CONFIG
from compressor.models.transformers.reading import reading_of
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import STORED, USUAL, Check, ExportContext, Exporter
from compressor.types.layers import StoredTensor

_SAMPLED = 8  # quantized tensors that are computed again, and kept ones that are compared
_ROWS = 1 << 16  # elements of each block that is


def check_written(plan: StreamPlan, directory: Path) -> str:
    """Compare files with the plan that they were written by.

    All headers are compared, and of several tensors in each shard the first block of rows, one in
    the middle and the last are computed again from the input.

    Returns:
        What was compared, in a few words.

    Raises:
        ArtifactError: they differ.
    """
    blocks = tensors = 0
    for shard in plan.shards:
        path = directory / shard.name
        _check_header(shard, path)
        with path.open("rb") as stream:
            for tensor in _sample(shard):
                tensors += 1
                cuts = pieces(tensor, _ROWS, shard.codes)
                for index in sorted({0, len(cuts) // 2, len(cuts) - 1}):
                    blocks += 1
                    _check_block(shard, tensor, cuts[index], stream.fileno())
    for name, text in plan.texts.items():
        _check_text(directory / name, text, "differs from what was planned")
    for place, source in plan.companions.items():
        _check_text(directory / place, source.read_bytes(), "differs from the input's")
    return f"{len(plan.shards)} headers, {blocks} blocks of {tensors} tensors computed again"


def _check_header(shard: PlannedShard, path: Path) -> None:
    with artifact_errors("export it again"):
        header = read_header(path)
    with path.open("rb") as stream:
        text = stream.read(len(shard.layout.header))
    if header.nbytes != shard.nbytes or text != shard.layout.header:
        problem = "describes other tensors than planned"
        raise ArtifactError(f"file {path.name!r}", problem, "export it again")


def _sample(shard: PlannedShard) -> list[StoredTensor]:
    """Return some tensors, those that are quantized and those that are kept."""
    known = [t for t in shard.sources if t.codes is not None and not t.codes.by_rows]
    sample = known  # it costs little to compare all of what is known
    for quantized in (True, False):
        if quantized and known:
            continue
        tensors = [t for t in shard.sources if (t.codes is not None) is quantized and t.elements]
        step = max(1, -(-len(tensors) // _SAMPLED))
        sample += tensors[::step]
    return sample


def _check_block(
    shard: PlannedShard, tensor: StoredTensor, rows: tuple[int, int], handle: int
) -> None:
    for name, expected, start in block_tensors(tensor, *rows, _ROWS, shard.codes):
        if not expected.numel():
            continue
        data = expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if os.pread(handle, len(data), shard.layout.offsets[name] + start) != data:
            raise ArtifactError(
                f"tensor {name!r}",
                f"in {shard.name!r} differs from its input",
                "the disk or the memory is faulty; export it again",
            )


def _check_text(path: Path, text: bytes, problem: str) -> None:
    if not path.is_file() or path.read_bytes() != text:
        raise ArtifactError(f"file {path.name!r}", problem, "export it again")


class SafetensorsExporter(Exporter):
    """Writes weights as safetensors, in one of two layouts.

    ``graph``: ``model.safetensors`` with all weights (or shards and their index) and
    ``model.json`` with the graph; ``compressor.load`` opens it. Codes of 4, 3 and 2 bits are
    packed, and weights with many zeros stored as sparse. ``compressed-tensors``: shards, their
    index, ``config.json`` and the tokenizer's files; ``transformers`` and vLLM open it. It is
    streamed, so the model may be larger than memory. ``gptq`` and ``awq`` are such directories for
    servers that read these, in 8, 4 and 2 bits and in 4 bits.
    """

    format: ClassVar[str] = "safetensors"
    packs: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    version: ClassVar[int] = 6
    not_judged: ClassVar[str] = STORED  # a device loads it and runs something else

    layout: Literal["auto", "graph", LayoutName] = Field(
        default="auto",
        description="graph: for compressor.load; compressed-tensors: a Hugging Face folder; "
        "gptq, awq: one of a bare checkpoint with integers as these programs store them; "
        "auto: graph where the model has one, compressed-tensors otherwise",
    )
    max_shard_size: int | None = Field(
        default=None,
        ge=1,
        description="largest size in bytes of a file of weights; default: one file for graph, and "
        "the input's shards for compressed-tensors, or 5 GB if it has none",
    )
    sparse: Literal["auto", "never"] = Field(
        default="auto",
        description="layout graph: auto omits zeros from weights that become a tenth smaller, so "
        "that the predicted size is an upper bound; never stores all elements",
    )

    consumer: Consumer | None = Field(
        default=None,
        description="layouts other than graph: the program that will load the result; the plan "
        "refuses layers for which it has no kernels",
    )

    @property
    def targets(self) -> frozenset[str]:
        """The layout of a directory, where the spec names it: it holds linear layers only."""
        return frozenset({self.layout} if self.layout in CODE_LAYOUTS else ())

    @property
    def bound(self) -> bool:
        """Whether prediction is an upper bound: zeros are counted only when weights are read."""
        return self.sparse == "auto" and self.layout not in CODE_LAYOUTS

    def check(self, carrier: Carrier) -> None:
        """Check that the model could be loaded again.

        Raises:
            SpecError: the layout needs a graph and the carrier has none, an operator or element
                type cannot be run by ``compressor.load``, or compressed-tensors has no form for a
                layer.
        """
        self.checked_bytes(carrier)

    def checked_bytes(self, carrier: Carrier) -> int:
        """Check the model, and return the bytes of all files; no weight is evaluated."""
        if self._streams(carrier):
            if self.consumer is not None:  # first: its remedies hold for this program
                tensors, layout = carrier.tensors().values(), self._codes.name
                stacked, places = _stacked(carrier), _places(carrier)
                check_consumer(self.consumer, tensors, layout, stacked, places)
            return self._plan(carrier).nbytes
        if self.consumer is not None:
            raise SpecError(
                "consumer",
                f"is {self.consumer!r}, which does not read layout graph",
                "set layout: compressed-tensors, or leave consumer out",
            )
        self.needed_graph(carrier, "set model.factory or model.onnx, or layout: compressed-tensors")
        plan = self._plan_graph(carrier, USUAL)
        try:
            check_graph(ir.from_proto(plan.parts.proto), without_data(plan.parts.tensors))
        except ModelError as error:
            raise SpecError(error.subject, error.problem, "leave out this export") from error
        return plan.nbytes

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of all files; no weight is evaluated.

        Weights count in full here even if zeros are left out of them later: zeros are counted only
        when weights are written.
        """
        if self._streams(carrier):
            return self._plan(carrier).nbytes
        return self._plan_graph(carrier, USUAL).nbytes

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write all files and open them.

        Several processes share the shards of a streamed model; the first returns the files.

        Raises:
            ArtifactError: they cannot be opened again.
            ModelError: an input file has changed, or a weight holds NaN or infinity.
        """
        if self._streams(carrier):
            return self._write_stream(carrier, directory, context)
        if context.ranks.rank:
            return ()
        files = self._plan_graph(carrier, context).write(directory)
        with artifact_errors():
            check(directory)
        return files

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare a streamed artifact's headers and a sample of its tensors with the model."""
        return check_written(self._plan(carrier), path.parent)

    def prove(self, carrier: Carrier, path: Path) -> tuple[Check, ...]:
        """Return whether ``transformers`` reads a streamed artifact as it was meant."""
        return prove(carrier, self._plan(carrier), path.parent)

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:
        """Return what share of a streamed artifact cannot be stored as codes.

        Of a graph, return why no directory for ``transformers`` could be written in its place.
        """
        if not self._streams(carrier):
            return _without_directory(carrier)
        cached, layout = bool(caches_of(carrier)), self._codes.name
        said = remark_on(self.consumer, carrier.tensors().values(), cached=cached)
        if lost_experts(carrier.tensors().values(), layout, _stacked(carrier)):
            said = (*said, f"transformers reads no codes of single experts from layout {layout}")
        return (*float_shares(carrier), *said)

    def open(self, path: Path) -> Runner:
        """Load the model with ``compressor.load``, or with ``transformers``.

        Args:
            path: the directory, or one of the files in it.
        """
        folder = path if path.is_dir() else path.parent
        if not (folder / DESCRIPTION).is_file():
            return TransformersRunner(folder)
        with artifact_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the report names the runtime
            module = load(folder)
        return module.runner if isinstance(module, RuntimeModule) else TorchRunner(module)

    def _streams(self, carrier: Carrier) -> bool:
        if self.layout == "auto":
            return Capability.GRAPH not in carrier.offers
        return self.layout in CODE_LAYOUTS

    def _plan_graph(self, carrier: Carrier, context: ExportContext) -> GraphPlan:
        model = carrier.graph()
        parts = skeleton(model, narrowed=True)
        sparse = self.sparse == "auto"
        return GraphPlan(model, parts, context.name, sparse, self.max_shard_size)

    def _plan(self, carrier: Carrier, key: str = "") -> StreamPlan:
        return plan_stream(carrier, key, self.max_shard_size, self._codes)

    @property
    def _codes(self) -> CodeLayout:
        """How quantized weights are stored in a directory."""
        return CODE_LAYOUTS.get(self.layout, COMPRESSED_TENSORS)

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
            name = file.path.relative_to(directory).as_posix()
            context.hashed(name, file.sha256)
            if file.tensors:
                context.summed(name, file.tensors)
        return tuple(file.path for file in written)


def _stacked(carrier: Carrier) -> frozenset[str]:
    """Return the weights of single experts that ``transformers`` stacks, by name."""
    reading = reading_of(carrier)
    return frozenset() if reading is None else reading.merged


def _places(carrier: Carrier) -> Mapping[str, str]:
    """Return the parameter of ``transformers`` that each tensor becomes, by name."""
    reading = reading_of(carrier)
    return {} if reading is None else reading.places


def _without_directory(carrier: Carrier) -> tuple[str, ...]:
    """Return why a network of ``transformers`` has no directory any more, and what opens it."""
    if not isinstance(carrier, TorchCarrier):
        return ()
    try:
        _ = carrier.config
    except SpecError as error:
        remedy = error.remedy.removesuffix(OR_GRAPH)
        return (
            f"compressor.load opens this model, and transformers could not: {CONFIG} "
            f"{error.problem}; for a directory, {remedy}",
        )
    return ()
