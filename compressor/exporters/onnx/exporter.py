"""Export to ONNX, by the rules of the runtime that will serve the file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import onnx_ir as ir
from pydantic import Field

from compressor.errors import ArtifactError, SpecError, artifact_errors
from compressor.exporters.onnx import opsets
from compressor.exporters.onnx.file import (
    INLINE_LIMIT,
    PROTOBUF_LIMIT,
    Layout,
    check_file,
    check_message,
    check_tensors,
    described,
    lay_out,
    write_layout,
)
from compressor.exporters.onnx.forms import in_form_for
from compressor.exporters.onnx.matmul_nbits import Compute
from compressor.exporters.onnx.short_names import with_short_names
from compressor.exporters.onnx.targets import TARGETS, first_breach
from compressor.graph.blocks import sink_constants
from compressor.graph.skeleton import Skeleton, skeleton
from compressor.models.onnx.checksums import onnx_checksums
from compressor.models.onnx.file import PRODUCER, TARGET
from compressor.models.onnx.ort_runner import lacks_kernels
from compressor.models.onnx.runtimes import GPU, runtime_for, versions_of, why_elsewhere
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import USUAL, ExportContext, Exporter


class OnnxExporter(Exporter):
    """Writes ``model.onnx``, and ``model.onnx.data`` beside it where weights are large."""

    format: ClassVar[str] = "onnx"
    version: ClassVar[int] = 14
    one_name: ClassVar[bool] = True  # the onnx package takes a second name for an attack

    opset: int | None = Field(
        default=None,
        ge=opsets.OLDEST,
        description="version of ONNX's operators; by default 21, the first with 4-bit integers, "
        "or the first later one that has all of the model's operators and element types",
    )
    target: Literal["ort-cpu", "ort-cuda", "openvino", "tensorrt"] = Field(
        default="ort-cpu",
        description="the runtime whose rules apply: tensorrt requires symmetric int8, zero points "
        "0 and float biases; the others take uint8 too; ort-cuda has kernels for half precision "
        "and 4-bit weights, not for int8 activations",
    )
    matmul_compute: Compute = Field(
        default="float32",
        description="for ONNX Runtime, arithmetic of products in which only the weight is "
        "quantized: float32 is exact, and expands weights of 8 and 2 bits when a session starts; "
        "int8 rounds activations to 8 bits too (about 0.5 % error) and is several times faster "
        "token by token",
    )
    external_data: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="weights in a file of their own; auto does so from external-from on",
    )
    external_from: int = Field(
        default=INLINE_LIMIT,
        ge=0,
        lt=PROTOBUF_LIMIT,
        description="bytes of weights from which external-data: auto writes them to their own file",
    )

    names: Literal["full", "short"] = Field(
        default="full",
        description="short replaces inner names by letters, except those of weights, names no "
        "nodes, and omits attributes with default values: a tenth of a file of some hundred kB",
    )

    @property
    def packs_pairs(self) -> bool:
        """For ONNX Runtime."""
        return self.target.startswith("ort")

    @property
    def targets(self) -> frozenset[str]:
        """The runtime whose rules passes should follow."""
        return frozenset({self.target})

    @property
    def exact(self) -> bool:
        """Whether it is meant for a GPU."""
        return self.target in GPU

    @property
    def not_judged(self) -> str:
        """Why latency is not judged: the target's runtime is not on this machine."""
        reason = why_elsewhere(self.target)
        return f"{reason}, timed in ONNX Runtime on the CPU" if reason else ""

    @property
    def on_gpu(self) -> bool:
        """Whether ONNX Runtime's CUDA provider runs it."""
        return self.target == "ort-cuda" and not why_elsewhere(self.target)

    @property
    def run_by(self) -> Mapping[str, str]:
        """The version of OpenVINO, and whether CUDA starts."""
        return versions_of(self.target)

    def check(self, carrier: Carrier) -> None:
        """Check that the opset and the target take what the model holds."""
        self.checked_bytes(carrier)

    def checked_bytes(self, carrier: Carrier) -> int:
        """Check the model, and return the bytes of all files; no weight is evaluated."""
        graph = self.needed_graph(carrier)
        newest = opsets.newest_opset()
        if self.opset is not None and self.opset > newest:
            raise SpecError(
                "opset",
                f"{self.opset} is not known to the installed onnx and ONNX Runtime",
                f"set opset: {newest} or lower",
            )
        breach = first_breach(graph, TARGETS[self.target], evaluate=False)
        if breach is not None:
            raise SpecError(*breach)
        if self.target == "ort-cpu" and lacks_kernels(graph):  # bfloat16 is a breach already
            raise SpecError(
                "export onnx",
                "computes in float64, and ONNX Runtime on the CPU has kernels of that type for "
                "some operators only",
                "put {pass: cast, dtype: fp32} behind the passes that train, or choose another "
                "target",
            )
        model = self._in_form(carrier)
        opset = self._opset(model)
        raised = model.opset_imports.get("", opset) < opset
        opsets.check_opset(opsets.convert(model, opset) if raised else model, opset)
        layout = self._layout(carrier, USUAL, model)
        wrong = check_message(layout)
        if wrong is not None:
            remedy = (
                f"set opset: {model.opset_imports['']}" if raised else "report it, with the model"
            )
            raise SpecError("the graph", f"is not valid in opset {opset} ({wrong})", remedy)
        if layout.model_bytes >= PROTOBUF_LIMIT:
            raise SpecError(
                "external-data",
                f"is {self.external_data!r}, but the model takes {layout.model_bytes:,} bytes and "
                "a file without external data 2 GB at most",
                "set external-data: auto",
            )
        return self._placed(layout).nbytes

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of all files; no weight is evaluated."""
        return self._placed(self._layout(carrier, USUAL)).nbytes

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the model and check what was written.

        Raises:
            ArtifactError: onnx's checker refuses the file, or it is not what was to be written.
        """
        breach = first_breach(carrier.graph(), TARGETS[self.target], evaluate=True)
        if breach is not None:
            raise ArtifactError(*breach)
        layout = self._placed(self._layout(carrier, context))
        expected = described(layout.proto)
        files = write_layout(layout, directory)
        check_file(files[0], self.opset or opsets.stated(layout.proto), expected)
        for name, sums in onnx_checksums(files[0]).items():
            context.summed(name, sums)
        return files

    def open(self, path: Path) -> Runner:
        """Open the file in its target, or in ONNX Runtime's CPU provider where that is not here."""
        with artifact_errors():
            return runtime_for(self.target, path).open(path, f"artifact {path.name!r}")

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare the tensors of a file with those of a model that cannot be run."""
        parts = self._parts(self._in_form(carrier))
        return check_tensors(path, parts.tensors)

    def _opset(self, model: ir.Model) -> int:
        return opsets.usual_opset(model) if self.opset is None else self.opset

    def _in_form(self, carrier: Carrier) -> ir.Model:
        return in_form_for(self.target, carrier.graph(), self.matmul_compute)

    def _placed(self, layout: Layout) -> Layout:
        """Place constants; ONNX Runtime fuses a weight only inside the branch that reads it."""
        if self.target.startswith("ort"):
            sink_constants(layout.proto.graph)
        return layout

    def _parts(self, model: ir.Model) -> Skeleton:
        parts = skeleton(opsets.convert(model, self._opset(model)))
        return with_short_names(parts) if self.names == "short" else parts

    def _layout(
        self, carrier: Carrier, context: ExportContext, model: ir.Model | None = None
    ) -> Layout:
        """Lay a model out, which may be given in the target's form."""
        parts = self._parts(self._in_form(carrier) if model is None else model)
        self._label(parts, context, carrier.graph().metadata_props)
        size = sum(tensor.nbytes for tensor in parts.tensors.values())
        external = self.external_data == "always" or (
            self.external_data == "auto" and size > self.external_from
        )
        return lay_out(parts, external)

    def _label(self, parts: Skeleton, context: ExportContext, given: Mapping[str, str]) -> None:
        """Note where the file is from; nothing that differs from run to run.

        What is noted in the user's own file stays: applications read class names, targets and the
        like. So the names of these notes are our own.
        """
        proto = parts.proto
        proto.ir_version = opsets.ir_version(opsets.stated(proto))
        proto.producer_name = PRODUCER
        proto.producer_version = version("compressor")
        notes = {
            **given,
            PRODUCER: version("compressor"),
            f"{PRODUCER}.name": context.name,
            f"{PRODUCER}.spec": context.spec_digest,
            TARGET: self.target,
        }
        for key, value in notes.items():
            proto.metadata_props.add(key=key, value=value)
