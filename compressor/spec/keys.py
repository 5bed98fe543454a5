"""The keys of a spec, as typed declarations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from compressor.catalog import BUILT_IN
from compressor.types.options import Like, Options

DType = Literal[
    "float32", "float16", "float64", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]


_METRICS = ", ".join(BUILT_IN["metric"])
FEEDS = "feeds"
"""The value of ``samples`` where each sample is a whole feed."""


def _count_or_feeds(value: object) -> object:
    if isinstance(value, str) and value != FEEDS:
        raise ValueError(f"give a number, or {FEEDS}")
    return value


class InputKeys(Options):
    """One model input."""

    shape: tuple[Annotated[int, Field(ge=1)] | str, ...] = Field(
        description="one entry per axis; a name is a dynamic axis, as in [batch, 3, 32, 32]"
    )
    dtype: DType = Field(default="float32", description="element type")


class ModelKeys(Options):
    """Where the model comes from: ``factory`` and ``checkpoint``, ``onnx``, or ``checkpoint``."""

    factory: str | None = Field(
        default=None,
        description="package.module:function that returns the torch module, or an auto class of "
        "transformers such as transformers.AutoModelForCausalLM",
    )
    checkpoint: str | None = Field(
        default=None,
        description="weights: .pt/.pth/.th (weights only), .safetensors, or a directory of shards",
    )
    onnx: str | None = Field(default=None, description="an ONNX file")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments for the factory; for an auto class of transformers, changes "
        "to config.json and dtype",
    )
    part: str | None = Field(
        default=None,
        description="for an auto class of transformers, the module in its network that is the "
        "model, such as encoder",
    )
    inputs: dict[str, InputKeys] = Field(
        default_factory=dict, description="the model's inputs by name, in the order of forward"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> ModelKeys:
        if self.onnx and (self.factory or self.checkpoint):
            raise ValueError("set either onnx, or factory and checkpoint, not both")
        if not (self.onnx or self.factory or self.checkpoint):
            raise ValueError("set onnx, or factory and checkpoint, or checkpoint")
        if self.part and not self.factory:
            raise ValueError("part belongs to a factory")
        return self


_Fold = Annotated[str, Like(r"[1-9]\d{0,3}/[1-9]\d{0,3}", "write it like 2/4; it counts from 1")]


class DataKeys(Options):
    """One data source. Besides these keys: one of the source kinds, and that kind's options."""

    inputs: dict[str, str] = Field(
        default_factory=dict, description="model input: name of the array in the source"
    )
    target: str | None = Field(default=None, description="name of the array with the right answers")
    transform: str | None = Field(
        default=None, description="package.module:function, fn(batch) or fn(batch, rng) -> batch"
    )
    samples: Annotated[
        Annotated[int, Field(ge=1)] | Literal["feeds"] | None, BeforeValidator(_count_or_feeds)
    ] = Field(
        default=None,
        description="use at most this many samples, the first ones; or feeds: each file of a "
        "folder (npz), or each dictionary that the factory yields, is one sample that the model "
        "takes whole, with arrays of any rank",
    )
    feeds: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="with samples: feeds: use at most this many, the first ones"
    )
    fold: _Fold | None = Field(
        default=None,
        description="use every n-th sample: 2/4 takes samples 2, 6, 10 and so on; folds of one "
        "source share no sample, so that roles can share a source; samples counts after it",
    )
    batch: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="samples in a batch; default: 32, the model's fixed number, or 1 for lines of "
        "text that calibrate, which then need no padding; not with feeds",
    )
    state: dict[str, str] = Field(
        default_factory=dict,
        description="with feeds: model input: model output that it takes from the step before; "
        "each feed is a sequence, whose arrays have the steps as first axis, and a state starts "
        "with zeros",
    )

    @model_validator(mode="after")
    def _fit_together(self) -> DataKeys:
        if self.samples == FEEDS and self.batch is not None:
            raise ValueError("leave batch out: the model takes one feed at a time")
        if self.fold is not None:
            number, of = map(int, self.fold.split("/"))
            if number > of:
                raise ValueError(f"fold {self.fold} does not exist: write 1/{of} to {of}/{of}")
        for key, value in (("state", self.state), ("feeds", self.feeds)):
            if value and self.samples != FEEDS:
                raise ValueError(f"add samples: {FEEDS}, which {key} needs")
        return self


class MetricKeys(Options):
    """A metric by ``name``, or a ``function`` of the user's own."""

    name: str | None = Field(default=None, description=f"a built-in metric: {_METRICS}")
    function: str | None = Field(
        default=None,
        description="package.module:function, fn(outputs, target) -> one value per sample",
    )
    higher_is_better: bool = Field(
        default=True, description="of a function alone: false if it returns losses or errors"
    )
    expect: float | None = Field(
        default=None,
        description="the float model's own figure, such as 94.6; the run ends before it "
        "compresses anything if the 95 % interval of the measured figure does not contain it",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> MetricKeys:
        if (self.name is None) == (self.function is None):
            raise ValueError("set either name or function")
        own = self.name is None or ":" in self.name
        if not own and "higher_is_better" in self.model_fields_set:
            raise ValueError(
                f"sets higher-is-better for {self.name!r}, whose direction is known; remove it, or "
                "give a function of your own"
            )
        return self


class LimitKeys(Options):
    """What every artifact must reach; ``null`` switches a limit off.

    A limit passes if the 95 % interval of what was measured lies inside, and fails if it lies
    outside; otherwise the verdict is unknown.
    """

    metric_drop: float | None = Field(
        default=1.0,
        description="how much worse the metric may be, in its unit (points); the default is 1 "
        "point, or 1 % of the float model's value if the metric has no points",
    )
    size_ratio: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0,
        description="largest ratio of bytes to those of the float model's file; the default is "
        "judged only if the passes make the model smaller",
    )
    latency_ratio: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="largest ratio of latency to the float model's"
    )

    def is_default(self, name: str) -> bool:
        """Return whether the spec does not set a limit.

        Args:
            name: a field, such as ``metric_drop``.
        """
        return name not in self.model_fields_set


class DataSection(Options):
    """Data by role."""

    calibration: dict[str, Any] | None = Field(
        default=None, description="unlabelled samples that statistics are gathered on"
    )
    evaluation: dict[str, Any] | None = Field(
        default=None, description="samples that the float model and every artifact are judged on"
    )
    training: dict[str, Any] | None = Field(
        default=None, description="samples for passes that train"
    )
    search: dict[str, Any] | None = Field(
        default=None,
        description="samples on which compress tune and the pass archive compare candidates, "
        "apart from those that judge",
    )


class SpecKeys(Options):
    """A whole spec."""

    version: Literal[1] = Field(description="version of the spec's format")
    name: Annotated[
        str,
        Like(
            r"[A-Za-z0-9][A-Za-z0-9._-]*",
            "use letters from a to z, digits, '.', '_' and '-', with a letter or a digit first",
        ),
    ] = Field(description="name of the result")
    seed: int = Field(default=0, ge=0, description="seed of everything random")
    model: ModelKeys = Field(description="where the model comes from")
    data: DataSection = Field(default_factory=DataSection, description="data by role")
    metric: str | MetricKeys | None = Field(
        default=None,
        description=f"{_METRICS}, package.module:function, or a section",
    )
    passes: tuple[dict[str, Any], ...] = Field(
        default=(), description="passes in order: {pass: NAME, ...its options}"
    )
    exports: tuple[dict[str, Any], ...] = Field(
        min_length=1, description="artifacts: {format: NAME, ...its options}"
    )
    limits: LimitKeys = Field(
        default_factory=LimitKeys, description="what every artifact must reach"
    )
    output: str | None = Field(
        default=None, description="folder of the results, relative to the spec; default out/NAME"
    )
