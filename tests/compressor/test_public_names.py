"""What other packages may import, name by name: a change of these lists is a change of the API."""

from __future__ import annotations

import compressor
from compressor import catalog, extension

PUBLIC = [
    "CompressorError",
    "LimitKeys",
    "MetricKeys",
    "ModelKeys",
    "PreparedModule",
    "RunOptions",
    "RunResult",
    "Spec",
    "TrainingStep",
    "__version__",
    "convert",
    "load",
    "prepare",
    "prune",
    "quantize",
    "run",
]
EXTENSION = [
    "Array",
    "ArtifactError",
    "Batch",
    "Block",
    "Capability",
    "Carrier",
    "Changes",
    "Check",
    "Choice",
    "CompressorError",
    "DataError",
    "Editor",
    "ExportContext",
    "Exporter",
    "FileSource",
    "GraphPass",
    "Header",
    "Layer",
    "LayerOutcome",
    "LayerPlan",
    "LayerRule",
    "Metric",
    "ModelError",
    "Moments",
    "Observer",
    "Options",
    "OrtRunner",
    "Outcome",
    "PackedFormat",
    "PassContext",
    "QuantizedTensor",
    "Range",
    "RangeObserver",
    "Request",
    "Rows",
    "Runner",
    "Scheme",
    "SpecError",
    "Survey",
    "TensorSpec",
    "TrainPass",
    "Training",
    "Treatment",
    "WeightChange",
    "WeightCodes",
    "WeightPass",
    "WeightRows",
    "constant_array",
    "initializer_bytes",
    "plan_layers",
    "resolve_rules",
    "skip_reason",
]
GROUPS = {
    "pass": "compressor.passes",
    "exporter": "compressor.exporters",
    "format": "compressor.formats",
    "metric": "compressor.metrics",
    "observer": "compressor.observers",
    "source": "compressor.sources",
}


def test_the_package_offers_what_it_promises() -> None:
    assert sorted(compressor.__all__) == PUBLIC
    assert all(hasattr(compressor, name) for name in PUBLIC)


def test_extensions_find_what_they_are_promised() -> None:
    assert extension.__all__ == EXTENSION
    assert all(hasattr(extension, name) for name in EXTENSION)


def test_entry_points_keep_their_groups() -> None:
    assert catalog.GROUPS == GROUPS
