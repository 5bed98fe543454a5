"""Export to a TensorRT engine, built from an ONNX graph whose types say all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.onnx.file import MODEL
from compressor.exporters.tensorrt import building
from compressor.exporters.tensorrt.building import (
    Engine,
    Settings,
    build,
    read_cache,
    unknown_operator,
    unsupported,
    write_cache,
)
from compressor.exporters.tensorrt.engine_layers import (
    EngineLayer,
    EngineTensor,
    Placed,
    check_placed,
    place,
    quantized_layers,
    read_layers,
)
from compressor.exporters.tensorrt.graph_form import (
    TARGET,
    Form,
    check_blocks,
    form_of,
    stand_in,
    weight_bytes,
)
from compressor.exporters.tensorrt.profiles import (
    BatchRange,
    ShapeRange,
    check_known,
    check_types,
    resolve_profiles,
)
from compressor.exporters.tensorrt.runner import EngineRunner
from compressor.files import file_sha256, scratch, staging
from compressor.graph.skeleton import skeleton
from compressor.graph.values import all_nodes
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import USUAL, ExportContext, Exporter
from compressor.types.options import Like
from compressor.types.proofs import NO_HASH, sealed_text

SCHEMA = 1
KIND = "tensorrt-engine"
ENGINE = "model.engine"
MANIFEST = f"{ENGINE}.json"
_TRIED = 64_000_000  # bytes of weights up to which a plan builds the engine with made-up ones
_MISPLACED: Mapping[building.BuilderName, Mapping[str, str]] = {
    "gpu": {"compute-capability": "builds for the GPU that it runs on"},
    "rtx": {
        "hardware-compatibility": "takes the GPUs from compute-capability",
        "sparse-weights": "chooses kernels when an engine is loaded, and has no use for it when it "
        "builds",
        "strip-weights": "does not strip weights without a GPU",
        "timing-cache": "measures nothing when it builds",
    },
}
"""The options that a builder has no use for, and why."""
_Capability = Annotated[str, Like(r"\d+\.\d", "write it like '8.6'")]


class TensorrtExporter(Exporter):
    """Writes ``model.engine``, and ``model.engine.json`` that says what is in it.

    The graph decides all types: each layer is built in the type that the passes left it in. Engines
    run only on NVIDIA GPUs. On a machine without one they are built, checked and weighed, but
    neither evaluated nor timed.
    """

    format: ClassVar[str] = "tensorrt"
    version: ClassVar[int] = 2
    exact: ClassVar[bool] = True
    estimated: ClassVar[bool] = True  # an engine holds kernels that the builder chooses
    on_gpu: ClassVar[bool] = True

    builder: building.BuilderName = Field(
        default="rtx",
        description="rtx: the package tensorrt-rtx, which builds for the named GPUs on any "
        "machine; gpu: the package tensorrt, which builds for the GPU of this machine",
    )
    compute_capability: tuple[_Capability, ...] = Field(
        default=(),
        description='for rtx, the GPUs to build for, as in ["8.6", "8.9"]; default: the '
        "builder's own choice, which omits 7.5",
    )
    batch: BatchRange | None = Field(
        default=None,
        description="sizes of the batch, for inputs whose first dimension alone is dynamic",
    )
    profiles: dict[str, ShapeRange] = Field(
        default_factory=dict, description="shapes of single inputs by name, all dimensions"
    )
    hardware_compatibility: Literal["none", "ampere-plus", "same-compute-capability"] = Field(
        default="none", description="for gpu, other GPUs on which the engine must run"
    )
    sparse_weights: bool = Field(
        default=False,
        description="for gpu, use kernels for 2:4 sparse weights (prune-nm)",
    )
    version_compatible: bool = Field(
        default=False, description="let later versions of TensorRT load the engine"
    )
    strip_weights: bool = Field(
        default=False,
        description="for gpu, leave the weights out; the engine is refitted before it runs",
    )
    timing_cache: str | None = Field(
        default=None,
        description="for gpu, a file, relative to the spec, that keeps measurements for later "
        "builds",
    )

    @property
    def targets(self) -> frozenset[str]:
        """TensorRT, and the builder where it has fewer kernels than TensorRT."""
        return frozenset({TARGET, "tensorrt-rtx"} if self.builder == "rtx" else {TARGET})

    @property
    def not_judged(self) -> str:
        """Why latency is not judged: the float model it is compared with runs on the CPU."""
        return "" if self.cannot_run else "timed on the GPU, the float model on the CPU"

    @property
    def cannot_run(self) -> str:
        """Why no GPU here runs the engine."""
        if self.strip_weights:
            return "an engine without weights has to be refitted first"
        return building.cannot_run(self.builder, self.compute_capability)

    @property
    def tools(self) -> dict[str, str]:
        """The builder, and the GPU where the engine is made for that."""
        return building.versions(self.builder)

    def check(self, carrier: Carrier) -> None:
        """Check that the builder is here, and can build what the model holds.

        Raises:
            SpecError: naming the option, input, layer or node, and what to change.
            ArtifactError: the engine would compute quantized layers with other types.
        """
        package = building.loaded(self.builder)
        capabilities = building.known_capabilities(package)
        self._check_options(capabilities)
        settings = self._settings(carrier)
        self.needed_graph(carrier)
        form = form_of(carrier)
        form.onnx.check(form.carrier)
        needs_gpu = building.BUILDERS[self.builder].needs_gpu
        targets = (building.own_capability(),) if needs_gpu else self.compute_capability
        check_types(form.model, targets, capabilities or targets)
        check_blocks(form.model)
        nodes = list(all_nodes(form.model.graph))
        with scratch() as folder:
            lacking = unsupported(folder, settings.package, [node.op_type for node in nodes])
        for node in nodes:
            if node.op_type in lacking:
                raise unknown_operator(node.name or "", node.op_type)
        try:
            engine = self._tried(form, settings)
        except ArtifactError as error:
            raise SpecError(error.subject, error.problem, error.remedy) from error
        if engine is not None:
            check_placed(_placed(engine, form.model)[1], self.builder)

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of engine and manifest.

        Small models are built with made-up weights. Of large ones, and where building means
        measuring kernels on a GPU, the weights are counted alone: code comes on top.
        """
        form, settings = form_of(carrier), self._settings(carrier)
        engine = self._tried(form, settings)
        if engine is None:
            return weight_bytes(skeleton(form.model))
        text = self._manifest(engine, form.model, form.carrier, USUAL, {MODEL: NO_HASH})
        return len(engine.plan) + len(text.encode())

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Build the engine, and check that its layers compute in the intended types.

        Raises:
            SpecError: the parser does not take the model.
            ArtifactError: there is no engine, or it computes quantized layers with other types.
        """
        building.loaded(self.builder)
        settings = self._settings(carrier, read_cache(context.folder, self.timing_cache))
        form = form_of(carrier)
        with staging(directory) as folder:
            files = form.onnx.write(form.carrier, folder, context)
            hashes = {file.name: file_sha256(file) for file in files}
            engine = build(files[0], settings)
            model = ir.load(files[0])
            check_placed(_placed(engine, model)[1], self.builder)
            text = self._manifest(engine, model, form.carrier, context, hashes)
        path, manifest = directory / ENGINE, directory / MANIFEST
        path.write_bytes(engine.plan)
        manifest.write_text(text, encoding="utf-8")
        write_cache(context.folder, self.timing_cache, engine.timing_cache)
        return path, manifest

    def check_written(self, carrier: Carrier, path: Path) -> str:  # noqa: ARG002
        """Compare an engine that cannot run here with its manifest."""
        manifest = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))
        if manifest["engine"]["sha256"] != file_sha256(path):
            raise ArtifactError(
                f"artifact {path.name!r}", f"does not match {MANIFEST}", "run the spec again"
            )
        meant = [entry for entry in manifest["quantized"] if entry["meant"]]
        compared = f"the engine of {MANIFEST}, {len(manifest['layers'])} layers"
        if not meant:
            return compared
        kinds = " and ".join(sorted({str(entry["meant"]) for entry in meant}))
        return f"{compared}; TensorRT reports all {len(meant)} quantized layers in {kinds}"

    def open(self, path: Path) -> Runner:
        """Load the engine on the GPU."""
        if self.cannot_run:
            raise ArtifactError(f"artifact {path.name!r}", "cannot be run", self.cannot_run)
        return EngineRunner(building.loaded(self.builder), path)

    def _check_options(self, capabilities: tuple[str, ...]) -> None:
        other = "rtx" if self.builder == "gpu" else "gpu"
        for option, reason in _MISPLACED[self.builder].items():
            name = option.replace("-", "_")
            if getattr(self, name) != type(self).model_fields[name].default:
                raise SpecError(
                    f"export tensorrt: {option}",
                    f"is not for builder {self.builder!r}, which {reason}",
                    f"leave it out, or set builder: {other}",
                )
        check_known(self.compute_capability, capabilities, self.builder)

    def _settings(self, carrier: Carrier, timing_cache: bytes | None = None) -> Settings:
        flags = [
            ("VERSION_COMPATIBLE", self.version_compatible),
            ("EXCLUDE_LEAN_RUNTIME", self.version_compatible and self.builder == "rtx"),
            ("SPARSE_WEIGHTS", self.sparse_weights),
            ("STRIP_PLAN", self.strip_weights),
        ]
        level = self.hardware_compatibility
        return Settings(
            package=building.BUILDERS[self.builder].package,
            capabilities=self.compute_capability,
            profiles=resolve_profiles(carrier.inputs, self.profiles, self.batch),
            flags=tuple(name for name, is_set in flags if is_set),
            hardware="" if level == "none" else level.upper().replace("-", "_"),
            timing_cache=timing_cache,
        )

    def _manifest(
        self,
        engine: Engine,
        model: ir.Model,
        carrier: Carrier,
        context: ExportContext,
        onnx: Mapping[str, str],
    ) -> str:
        """Return the manifest's text; nothing in it differs between equal builds.

        Args:
            onnx: sha256 of each ONNX file that the engine was built from, by name.
        """
        layers, placed = _placed(engine, model)
        settings = engine.settings
        document = {
            "schema": SCHEMA,
            "kind": KIND,
            "name": context.name,
            "spec": context.spec_digest,
            "engine": {"bytes": len(engine.plan), "sha256": sha256(engine.plan).hexdigest()},
            "onnx": dict(onnx),
            "builder": self.builder,
            "versions": self.tools,
            "compute_capabilities": list(settings.capabilities) or None,
            "flags": list(settings.flags),
            "hardware_compatibility": settings.hardware or None,
            "profiles": {name: profile.model_dump() for name, profile in settings.profiles.items()},
            "inputs": [str(spec) for spec in carrier.inputs],
            "outputs": [str(spec) for spec in carrier.outputs],
            "layers": [_layer(layer) for layer in layers],
            "quantized": [
                {
                    "layer": entry.meant.layer,
                    "node": entry.meant.node,
                    "stored": entry.meant.stored,
                    "meant": entry.meant.computed or None,
                    "computed": entry.computed or None,
                }
                for entry in placed
            ],
        }
        return sealed_text(document)

    def _tried(self, form: Form, settings: Settings) -> Engine | None:
        """Build a small model with made-up weights; ``None`` for others."""
        if building.BUILDERS[self.builder].needs_gpu:
            return None
        parts = skeleton(form.model)
        if weight_bytes(parts) > _TRIED:
            return None
        with scratch() as folder:
            model = folder / MODEL
            model.write_bytes(stand_in(parts))
            return build(model, settings)


def _placed(engine: Engine, model: ir.Model) -> tuple[tuple[EngineLayer, ...], tuple[Placed, ...]]:
    """Return the engine's layers, and what became of those with quantized weights."""
    layers = read_layers(engine.layers, [node.name or "" for node in all_nodes(model.graph)])
    return layers, place(quantized_layers(model), layers)


def _layer(layer: EngineLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "type": layer.type,
        "precision": layer.precision or None,
        "nodes": list(layer.nodes),
        "inputs": [_tensor(tensor) for tensor in layer.inputs],
        "constants": [_tensor(tensor) for tensor in layer.constants],
        "outputs": [_tensor(tensor) for tensor in layer.outputs],
    }


def _tensor(tensor: EngineTensor) -> str:
    return f"{tensor.dtype}[{', '.join('?' if d < 0 else str(d) for d in tensor.shape)}]"
