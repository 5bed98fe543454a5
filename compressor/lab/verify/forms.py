"""What files that a run left have to hold, so that what reads them can rely on it.

Only what is read is listed; a file may hold more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compressor.errors import ModelError
from compressor.files import read_json

EDITED = "it was edited or damaged; run the spec again"

_Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Number = Annotated[float, Field(ge=-1e18, le=1e18)]
Positive = Annotated[float, Field(gt=1e-18, le=1e18)]
_Pair = Annotated[list[_Number], Field(min_length=2, max_length=2)]
_Interval = Annotated[list[Positive], Field(min_length=2, max_length=2)]
_Verdict = Literal["passed", "failed", "unknown"]
_Words = dict[str, str]


class Form(BaseModel):
    """A mapping in a file."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class _Output(Form):
    name: str
    sha256: str
    tensors: _Words = {}


class _Input(Form):
    name: str
    sha256: str | None


class Manifest(Form):
    """``manifest.json``."""

    name: str
    seed: _Whole
    versions: _Words
    inputs: list[_Input] = []
    outputs: list[_Output]
    spec: dict[str, Any]
    spec_file: str | None = None


class _Engine(Form):
    sha256: str


class _Profile(Form):
    min: list[_Whole]
    opt: list[_Whole]
    max: list[_Whole]


class _EngineLayer(Form):
    name: str
    type: str
    precision: str | None
    inputs: list[str]
    constants: list[str]
    outputs: list[str]


class _Meant(Form):
    meant: str | None
    computed: str | None


class EngineManifest(Form):
    """``model.engine.json``."""

    kind: Literal["tensorrt-engine"]
    engine: _Engine
    builder: str | None = None
    versions: _Words
    compute_capabilities: list[str] | None = None
    profiles: dict[str, _Profile]
    inputs: list[str] = []
    outputs: list[str] = []
    layers: list[_EngineLayer]
    quantized: list[_Meant]


class MetricForm(Form):
    """A metric, as in a report and in a history."""

    name: str
    value: _Number
    samples: Count
    ci95: _Pair
    unit: str
    higher_is_better: bool


class ScaleForm(Form):
    """What makes a metric of the samples' results, as in a report and in a history."""

    factor: _Number
    exponential: bool


class _Times(Form):
    p50: Positive


class _Timed(_Times):
    batch: Count


class _Ratio(Form):
    value: Positive
    ci95: _Interval


class _Row(Form):
    batch: Count
    artifact: _Times
    ratio: _Ratio
    fused_ratio: _Ratio | None = None


class _Model(Form):
    bytes: Count
    metric: MetricForm | None
    metric_reason: str | None = None
    latency_ms: _Times | None
    latency_ms_reason: str | None = None
    peak_memory_bytes: _Number | None = None
    peak_memory_range: _Pair | None = None
    peak_memory_bytes_reason: str | None = None


class _Baseline(_Model):
    parameters: Count | None
    macs: Count | None
    latency: list[_Timed]


class _Named(Form):
    name: str


class _Check(_Named):
    ok: bool
    verdict: _Verdict | None = None
    detail: str | None = None


class _Contents(Form):
    weights: Count


class _Artifact(_Model):
    format: str
    path: str
    runtime: str | None
    files: list[_Named]
    contents: _Contents | None = None
    sha256: str | None = None
    float_bytes: Count | None = None
    size_ratio: Positive
    remarks: list[str] | None = None
    deployed: bool
    metric_drop: _Number | None = None
    metric_drop_ci95: _Pair | None = None
    latency: list[_Row]
    latency_ratio: Positive | None
    latency_ratio_reason: str | None = None
    checks: list[_Check]

    @model_validator(mode="after")
    def _has_rows(self) -> _Artifact:
        if (self.latency_ratio is not None or self.deployed) and not self.latency:
            raise ValueError("it has a latency ratio, and no latency")
        return self


class _Attributed(_Named):
    scheme: str
    bytes_to_skip: int  # negative where the pass made the layer larger
    own_sqnr_db: _Number | None
    output_sqnr_db: _Number | None
    metric_noise: _Number | None = None


class _Attribution(Form):
    basis: Literal["outputs", "layers", "weights"]
    reason: str | None
    shared_inputs: _Number | None
    metric_basis: str | None = None
    shared_metric_noise: _Number | None = None
    layers: list[_Attributed]


class _Layer(_Named):
    scheme: str


class _Weakest(_Named):
    sqnr_db: _Number


class _Untrained(Form):
    metric: MetricForm
    metric_drop: _Number
    won_back: _Number | None
    won_back_reason: str | None = None


class _Pass(Form):
    name: str = Field(alias="pass")
    seconds: _Number
    cached: bool
    metric: MetricForm | None
    metric_drop: _Number | None
    sqnr_db: _Number | None
    bytes: Count
    weakest: _Weakest | None
    notes: list[str]
    layers: list[_Layer]
    untrained: _Untrained | None = None
    attribution: _Attribution | None


class _Limit(_Named):
    artifact: str
    limit: _Number
    measured: _Number | None
    ci95: _Pair | None = None
    default: bool = False
    verdict: _Verdict
    reason: str | None = None
    ok: bool


class _Identity(Form):
    model: str
    data: str | None
    metric_code: str | None
    spec: str | None = None


class _Suggestion(Form):
    layer: str
    change: dict[str, bool | _Whole | str]


class _Gain(Form):
    bytes: _Whole
    metric: _Number | None
    sqnr_db: _Number | None


class _Advice(Form):
    reason: str | None
    suggested: list[_Suggestion]
    predicted: _Gain | None


class _Flipped(Form):
    samples: Count
    flipped: Count | None
    lost: Count | None
    won: Count | None


class _PerSample(ScaleForm):
    file: Annotated[str, Field(pattern=r"^[^/]+$")]


class _Environment(Form):
    python: str
    versions: _Words
    processor: str | None
    cores: Count | None
    system: str | None


class Report(Form):
    """``report.json``."""

    schema_: Literal[1] = Field(alias="schema")
    name: str
    identity: _Identity
    ok: bool
    verdict: _Verdict
    baseline: _Baseline
    artifacts: list[_Artifact]
    passes: list[_Pass]
    limits: list[_Limit]
    flipped: _Flipped | None = None
    per_sample: _PerSample | None
    environment: _Environment
    advice: _Advice | None = None


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that a run left.

    Raises:
        ModelError: it cannot be read, or is not a mapping.
    """
    subject = f"file {str(path)!r}"
    value = read_json(path, subject, "cannot be read", EDITED)
    if not isinstance(value, dict):
        raise ModelError(subject, "is not a mapping", EDITED)
    return value


def check_form(form: type[Form], content: Any, subject: str, problem: str) -> None:
    """Check that a value is what a file should hold.

    Raises:
        ModelError: it is not, which is the ``problem``; the first place that differs follows.
    """
    try:
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        where = f"{place}: {first['msg']}" if place else first["msg"]
        raise ModelError(subject, f"{problem} ({where})", EDITED) from error


def check_report(report: Any, subject: str) -> None:
    """Check that ``report.json`` holds what is read of it; raises as :func:`check_form` does."""
    check_form(Report, report, subject, "has a report that this version cannot read")
