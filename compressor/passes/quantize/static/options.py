"""Options of ``quantize-static``, as they stand in a spec."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from compressor import catalog
from compressor.errors import SpecError, suggestion
from compressor.types.options import Options
from compressor.types.passes import LayerRule

ActivationBits = Literal[4, 6, 8]
WeightBits = Literal[8, 4, 3, 2]  # in the order of `quantize-weights`: equal unions are shared


Overflow = Annotated[
    Literal["avoid", "allow"],
    Field(
        description="x86 CPUs without VNNI add the products of two 8-bit weights in 16 bits, which "
        "saturates. avoid keeps such pairs of weights small enough, so that the file gives the "
        "same answers on every CPU; allow is a few tenths of a dB better on CPUs with VNNI and on "
        "ARM, and can be useless on others"
    ),
]


class WeightSettings(Options):
    """How weights are quantized, whether they are rounded or trained."""

    bits: WeightBits = Field(default=8, description="width of a weight")
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale per output channel or per tensor"
    )
    symmetric: bool = Field(default=True, description="zero point 0")
    overflow: Overflow = "avoid"


class WeightOptions(WeightSettings):
    """How weights are quantized."""

    range: Literal["min-max", "mse", "output-error"] | None = Field(
        default=None,
        description="full range, the range of least squared error, or the range at which the "
        "layer's output changes least; default: min-max for 8 bits, output-error for fewer",
    )
    rounding: Literal["gptq", "nearest", "reconstruct"] = Field(
        default="gptq",
        description="gptq compensates each weight's rounding error in the weights that follow, so "
        "that the layer's output changes least (arXiv:2210.17323); reconstruct continues from "
        "there: it trains rounding and activations' steps block by block, on the calibration data "
        "without labels, until the block's output changes least; it takes minutes for large "
        "networks and is worth it below 8 bits",
    )


AUTO = "auto"
CANDIDATES = ("mse", "min-max", "percentile", "entropy", "extreme-value")
"""What ``auto`` chooses from; the first stays unless another is better."""

_SET_BY_PASSES = frozenset({"bits", "symmetric"})  # options that every observer of ranges has


def range_observers() -> list[str]:
    """Return the names of the catalog's observers that find a quantizer's range."""
    names = []
    for name in catalog.names("observer"):
        with suppress(SpecError):  # another package's may not import
            if _finds_range(name):
                names.append(name)
    return names


def _finds_range(name: str) -> bool:
    declared: type[Options] = catalog.load("observer", name)
    return declared.model_fields.keys() >= _SET_BY_PASSES


def _list_observers(schema: dict[str, Any]) -> None:
    text = schema["anyOf"][0] if "anyOf" in schema else schema
    text["enum"] = range_observers()


def _list_observers_and_auto(schema: dict[str, Any]) -> None:
    _list_observers(schema)
    schema["anyOf"][0]["enum"].insert(0, AUTO)


class NamedObserver(Options):
    """An observer with values for options of its own."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="the observer; its own options stand beside its name",
        json_schema_extra=_list_observers,
    )

    def options(self) -> dict[str, Any]:
        """Return the observer's own options, by field name.

        Raises:
            ValueError: the observer has no such option, or does not take its value.
        """
        declared: type[Options] = catalog.load("observer", self.name)
        written = self.model_extra or {}
        keys = [f.alias or k for k, f in declared.model_fields.items() if k not in _SET_BY_PASSES]
        for key in written:
            if key in _SET_BY_PASSES:
                raise ValueError(f"{key} is set by the pass: leave it out here")
            if key not in keys:
                raise ValueError(f"{key} is not an option of {self.name}: {suggestion(key, keys)}")
        try:
            observer = declared.model_validate_json(json.dumps(written))
        except ValidationError as error:
            detail = error.errors()[0]
            raise ValueError(f"{detail['loc'][0]}: {detail['msg']}") from None
        return {name: getattr(observer, name) for name in observer.model_fields_set}


class ActivationOptions(Options):
    """How activations are quantized."""

    bits: ActivationBits = Field(default=8, description="width of an activation")
    observer: str | NamedObserver = Field(
        default="mse",
        description="how the range is chosen from the calibration data, by name, or with options "
        "as {name: moving-average, constant: 0.1}; extreme-value suits detectors and others where "
        "large values carry the answer and calibration data are few",
        json_schema_extra=_list_observers,
    )
    symmetric: bool | Literal["auto"] = Field(
        default="auto", description="zero point 0; auto: only where an export's target demands it"
    )
    percentile: float | None = Field(
        default=None, gt=50, le=100, description="for observer percentile: share of values inside"
    )
    exact_pixels: bool = Field(
        default=True,
        description="if the input is normalized 8-bit images, use the pixels as its codes, "
        "without rounding; channels that are normalized differently cost three cheap operators",
    )

    @field_validator("observer")
    @classmethod
    def _finds_a_range(cls, observer: str | NamedObserver) -> str | NamedObserver:
        name = observer if isinstance(observer, str) else observer.name
        others = [AUTO] if cls.model_fields["observer"].default == AUTO else []
        if observer in others:
            return observer
        if name not in catalog.names("observer") or not _finds_range(name):
            raise ValueError(suggestion(name, [*others, *range_observers()]))
        if isinstance(observer, NamedObserver):
            observer.options()
        return observer

    @property
    def observer_name(self) -> str:
        """The observer's name in the catalog, or ``auto``."""
        return self.observer if isinstance(self.observer, str) else self.observer.name

    @property
    def observers(self) -> tuple[str, ...]:
        """The observer's name, or those that ``auto`` chooses from."""
        return CANDIDATES if self.observer == AUTO else (self.observer_name,)

    @property
    def observer_options(self) -> dict[str, Any]:
        """The observer's own options that the spec gives, by field name."""
        options = {} if isinstance(self.observer, str) else self.observer.options()
        return options if self.percentile is None else {**options, "percentile": self.percentile}


class StaticActivationOptions(ActivationOptions):
    """How activations are quantized."""

    observer: str | NamedObserver = Field(
        default=AUTO,
        description="how the range is chosen from the calibration data, by name, or with options "
        f"as {{name: moving-average, constant: 0.1}}; auto is the one of {', '.join(CANDIDATES)} "
        "with which the model's outputs err least on calibration samples",
        json_schema_extra=_list_observers_and_auto,
    )


class QuantizeRule(LayerRule):
    """How single layers are quantized."""

    bits: WeightBits | None = Field(default=None, description="width of these layers' weights")
    granularity: Literal["channel", "tensor"] | None = Field(
        default=None, description="granularity of these layers' weights"
    )
    activation_bits: ActivationBits | None = Field(
        default=None,
        description="width of these layers' inputs; if other layers read them too, the widest "
        "applies",
    )


class StaticRule(QuantizeRule):
    """Per-layer settings of ``quantize-static``."""
