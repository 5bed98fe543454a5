"""What is built in, as one literal table; third parties add theirs through entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from compressor.errors import SpecError
from compressor.names import suggestion

Kind = Literal["pass", "exporter", "observer", "source"]

BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "pass": {
        "fuse": "passes.fuse.fuse:Fuse",
        "prune-magnitude": "passes.prune.magnitude:PruneMagnitude",
        "prune-nm": "passes.prune.nm:PruneNm",
        "prune-wanda": "passes.prune.wanda:PruneWanda",
        "prune-sparsegpt": "passes.prune.sparsegpt:PruneSparsegpt",
        "prune-structured": "passes.prune.structured:PruneStructured",
        "finetune": "passes.train.finetune:Finetune",
        "qat": "passes.train.qat:Qat",
        "distill": "passes.train.distill:Distill",
        "early-exit": "passes.train.early_exit:EarlyExit",
        "low-rank": "passes.factor.low_rank:LowRank",
        "quantize-static": "passes.quantize.static:QuantizeStatic",
        "quantize-dynamic": "passes.quantize.dynamic:QuantizeDynamic",
        "quantize-weights": "passes.quantize.weight_only:QuantizeWeights",
        "cast": "passes.quantize.cast:Cast",
        "cluster": "passes.quantize.cluster:Cluster",
    },
    "exporter": {
        "safetensors": "exporters.safetensors.exporter:SafetensorsExporter",
        "onnx": "exporters.onnx.exporter:OnnxExporter",
        "tensorrt": "exporters.tensorrt.exporter:TensorrtExporter",
        "archive": "exporters.archive.exporter:ArchiveExporter",
    },
    "observer": {
        "min-max": "calibration.observers.min_max:MinMax",
        "moving-average": "calibration.observers.moving_average:MovingAverage",
        "percentile": "calibration.observers.percentile:Percentile",
        "entropy": "calibration.observers.entropy:Entropy",
        "mse": "calibration.observers.mse:Mse",
        "extreme-value": "calibration.observers.extreme_value:ExtremeValue",
        "second-moment": "calibration.observers.second_moment:SecondMoment",
        "column-norm": "calibration.observers.column_norm:ColumnNorm",
        "channel-grid": "calibration.observers.channel_grid:ChannelGridObserver",
        "channel-magnitude": "calibration.observers.channel_magnitude:ChannelMagnitude",
    },
    "source": {
        "npz": "calibration.sources.npz:NpzSource",
        "npy": "calibration.sources.npy:NpySource",
        "safetensors": "calibration.sources.safetensors_file:SafetensorsSource",
        "images": "calibration.sources.images:ImageFolderSource",
        "text": "calibration.sources.text:TextSource",
        "jsonl": "calibration.sources.jsonl:JsonlSource",
    },
}
COLLECT = "calibration.collect:collect"
UNPACK = "exporters.archive.unpacking:unpack"
ARCHIVE_SIZES = "exporters.archive.unpacking:stored_bytes"

_GROUPS: Mapping[Kind, str] = {
    "pass": "compressor.passes",
    "exporter": "compressor.exporters",
    "observer": "compressor.observers",
    "source": "compressor.sources",
}


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Return all names of a kind: the built-in ones in their order, then third parties'."""
    return (*BUILT_IN[kind], *sorted(_third_party(kind)))


@cache
def load(kind: Kind, name: str) -> Any:
    """Return the class behind a name.

    Raises:
        SpecError: there is no such name, or its package does not import.
    """
    extra = _third_party(kind)
    try:
        if name in BUILT_IN[kind]:
            return resolve(BUILT_IN[kind][name])
        if name in extra:
            return extra[name].load()
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"{kind} {name!r}", f"does not import ({error})", "reinstall its package"
        ) from error
    raise SpecError(f"{kind} {name!r}", "is not known", suggestion(name, names(kind)))


def resolve(reference: str) -> Any:
    """Import ``package.module:Name`` from this distribution."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def _third_party(kind: Kind) -> dict[str, Any]:
    found = {e.name: e for e in entry_points(group=_GROUPS[kind])}
    return {name: entry for name, entry in found.items() if name not in BUILT_IN[kind]}
