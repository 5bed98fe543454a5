"""What packages with passes, observers, metrics, exporters or sources of their own import.

Other modules of this package may change from one version to the next; these names stay. See the
guide's page on extending.
"""

from __future__ import annotations

from compressor.calibration.observers.ranges import RangeObserver
from compressor.calibration.sources.file_source import FileSource, Header, Rows
from compressor.errors import ArtifactError, CompressorError, DataError, ModelError, SpecError
from compressor.graph.costs import initializer_bytes
from compressor.graph.editing import Editor
from compressor.graph.values import constant_array
from compressor.models.onnx.ort_session import OrtRunner
from compressor.run.metrics.metrics import Metric
from compressor.run.weight_pass import Changes, Choice, Treatment, WeightPass, WeightRows
from compressor.types.carrier import Capability, Carrier, Runner, WeightChange
from compressor.types.exporter import Check, ExportContext, Exporter, PackedFormat
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.options import Options
from compressor.types.passes import (
    GraphPass,
    LayerOutcome,
    LayerPlan,
    LayerRule,
    Outcome,
    PassContext,
    Survey,
    TrainPass,
)
from compressor.types.statistics import Block, Moments, Observer, Range, Request
from compressor.types.tensors import Array, Batch, TensorSpec
from compressor.types.training import Training

__all__ = [
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
