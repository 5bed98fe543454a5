"""What is built in, as one literal table; third parties add theirs through entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal

from compressor.errors import SpecError, suggestion

Kind = Literal["pass", "exporter", "format", "metric", "observer", "source"]

BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "pass": {
        "fuse": "compressor.passes.fuse.fuse:Fuse",
        "equalize": "compressor.passes.prepare.equalize:Equalize",
        "smooth": "compressor.passes.prepare.equalize:Smooth",
        "rotate": "compressor.passes.prepare.rotate:Rotate",
        "prune-magnitude": "compressor.passes.prune.magnitude.magnitude:PruneMagnitude",
        "prune-nm": "compressor.passes.prune.sparse.passes:PruneNm",
        "prune-wanda": "compressor.passes.prune.sparse.passes:PruneWanda",
        "prune-sparsegpt": "compressor.passes.prune.sparse.passes:PruneSparsegpt",
        "prune-structured": "compressor.passes.prune.structured.structured:PruneStructured",
        "finetune": "compressor.passes.train.finetune:Finetune",
        "qat": "compressor.passes.train.qat.qat:Qat",
        "archive": "compressor.passes.train.archive.archive:Archive",
        "distill": "compressor.passes.train.distill.distill:Distill",
        "early-exit": "compressor.passes.train.early_exit.early_exit:EarlyExit",
        "low-rank": "compressor.passes.factor.low_rank:LowRank",
        "quantize-static": "compressor.passes.quantize.static.static:QuantizeStatic",
        "quantize-dynamic": "compressor.passes.quantize.dynamic:QuantizeDynamic",
        "quantize-weights": "compressor.passes.quantize.weights.weights:QuantizeWeights",
        "quantize-cache": "compressor.passes.quantize.attention_cache:QuantizeCache",
        "cast": "compressor.passes.quantize.cast.cast:Cast",
        "cluster": "compressor.passes.quantize.cluster:Cluster",
    },
    "exporter": {
        "safetensors": "compressor.exporters.safetensors.exporter:SafetensorsExporter",
        "onnx": "compressor.exporters.onnx.exporter:OnnxExporter",
        "tensorrt": "compressor.exporters.tensorrt.exporter:TensorrtExporter",
        "archive": "compressor.exporters.archive.exporter:ArchiveExporter",
        "coreml": "compressor.exporters.coreml.exporter:CoremlExporter",
        "executorch": "compressor.exporters.executorch.exporter:ExecutorchExporter",
        "gguf": "compressor.exporters.gguf.exporter:GgufExporter",
        "genai": "compressor.exporters.genai.exporter:GenaiExporter",
        "litert": "compressor.exporters.litert.exporter:LitertExporter",
        "openvino": "compressor.exporters.openvino.exporter:OpenvinoExporter",
        "ort": "compressor.exporters.ort.exporter:OrtExporter",
    },
    "format": {
        "archive": "compressor.exporters.archive.unpacking:ArchiveFormat",
    },
    "metric": {
        "accuracy": "compressor.run.metrics.class_metrics:ACCURACY",
        "agreement": "compressor.run.metrics.class_metrics:AGREEMENT",
        "top5": "compressor.run.metrics.class_metrics:TOP5",
        "mse": "compressor.run.metrics.metrics:MSE",
        "cosine": "compressor.run.metrics.metrics:COSINE",
        "perplexity": "compressor.run.metrics.class_metrics:PERPLEXITY",
        "embedding": "compressor.run.metrics.text_metrics:EMBEDDING",
        "f1": "compressor.run.metrics.text_metrics:F1",
        "spearman": "compressor.run.metrics.text_metrics:SPEARMAN",
        "token-accuracy": "compressor.run.metrics.text_metrics:TOKEN_ACCURACY",
        "subset-accuracy": "compressor.run.metrics.class_metrics:SUBSET_ACCURACY",
        "span-accuracy": "compressor.run.metrics.text_metrics:SPAN_ACCURACY",
        "character-error-rate": "compressor.run.metrics.text_metrics:CHARACTER_ERROR_RATE",
    },
    "observer": {
        "min-max": "compressor.calibration.observers.ranges:MinMax",
        "moving-average": "compressor.calibration.observers.ranges:MovingAverage",
        "percentile": "compressor.calibration.observers.ranges:Percentile",
        "entropy": "compressor.calibration.observers.ranges:Entropy",
        "mse": "compressor.calibration.observers.ranges:Mse",
        "extreme-value": "compressor.calibration.observers.ranges:ExtremeValue",
        "second-moment": "compressor.calibration.observers.channels:SecondMoment",
        "column-norm": "compressor.calibration.observers.channels:ColumnNorm",
        "channel-grid": "compressor.calibration.observers.channels:ChannelGridObserver",
        "channel-magnitude": "compressor.calibration.observers.channels:ChannelMagnitude",
        "channel-spans": "compressor.calibration.observers.channels:ChannelSpan",
        "channel-clip": "compressor.calibration.observers.channel_clips:ChannelClip",
    },
    "source": {
        "npz": "compressor.calibration.sources.arrays:NpzSource",
        "npy": "compressor.calibration.sources.arrays:NpySource",
        "safetensors": "compressor.calibration.sources.arrays:SafetensorsSource",
        "images": "compressor.calibration.sources.images:ImageFolderSource",
        "wav": "compressor.calibration.sources.audio:WavFolderSource",
        "text": "compressor.calibration.sources.tokens:TextSource",
        "jsonl": "compressor.calibration.sources.tokens:JsonlSource",
    },
}

GROUPS: Mapping[Kind, str] = {
    "pass": "compressor.passes",
    "exporter": "compressor.exporters",
    "format": "compressor.formats",
    "metric": "compressor.metrics",
    "observer": "compressor.observers",
    "source": "compressor.sources",
}


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Return all names of a kind: the built-in ones in their order, then third parties'."""
    return (*BUILT_IN[kind], *sorted(third_party(kind)))


@cache
def load(kind: Kind, name: str) -> Any:
    """Return the class behind a name.

    >>> load("observer", "min-max").name
    'min-max'

    Raises:
        SpecError: there is no such name, or its package does not import.
    """
    try:
        if name in BUILT_IN[kind]:
            return resolve(BUILT_IN[kind][name])
        if name in third_party(kind):
            return third_party(kind)[name].load()
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{kind} {name!r}", f"does not import ({error})", "reinstall its package"
        ) from error
    raise SpecError(f"{kind} {name!r}", "is not known", suggestion(name, names(kind)))


def resolve(reference: str) -> Any:
    """Import ``package.module:Name`` from this distribution."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def lazy_classes(kind: Kind, module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module with the built-in classes of a kind.

    Each is imported on first use.
    """
    references = {r.partition(":")[2]: r for r in BUILT_IN[kind].values()}

    def load_class(name: str) -> Any:
        if name not in references:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return resolve(references[name])

    return load_class, lambda: sorted(references)


@cache  # to read the metadata of all packages takes as long as to plan
def third_party(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of other packages by name; they replace nothing that is built in."""
    entries = {entry.name: entry for entry in entry_points(group=GROUPS[kind])}
    return {name: entry for name, entry in entries.items() if name not in BUILT_IN[kind]}


def raised_by_third_party(error: BaseException) -> str:
    """Return the package of third parties whose code raised an error, with the line; empty if none.

    It is that of the innermost frame that lies in one: what a library raises is put down to who
    called it.
    """
    packages = {
        entry.module.partition(".")[0] for kind in GROUPS for entry in third_party(kind).values()
    }
    frames = walk_tb(error.__traceback__)
    found = [
        f"package {name!r} ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in frames
        if (name := str(frame.f_globals.get("__name__")).partition(".")[0]) in packages
    ]
    return found[-1] if found else ""
