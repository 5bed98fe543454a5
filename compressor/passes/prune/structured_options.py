"""Options of ``prune-structured``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from compressor.types.options import Options, kebab
from compressor.types.passes import LayerRule

Criterion: TypeAlias = Literal["l2", "l1", "batch-norm", "taylor", "activation", "random"]
Kind: TypeAlias = Literal["ratio", "macs", "parameters", "latency"]
Scope: TypeAlias = Literal["global", "local", "sensitivity"]
Minimum: TypeAlias = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]

_KINDS: tuple[Kind, ...] = ("ratio", "macs", "parameters", "latency")


class Target(Options):
    """How much is to be removed, or to remain; exactly one of them."""

    ratio: float | None = Field(
        default=None, gt=0, lt=1, description="share of each group's units that is removed"
    )
    macs: float | None = Field(
        default=None, gt=0, le=1, description="multiply-accumulates that remain, as a share"
    )
    parameters: float | None = Field(
        default=None, gt=0, le=1, description="weights that remain, as a share"
    )
    latency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="time of one batch that remains, as a share; candidates are measured in ONNX "
        "Runtime on this machine",
    )

    @model_validator(mode="after")
    def _one(self) -> Target:
        given = [k for k in _KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(given or _KINDS)}")
        return self

    @property
    def kind(self) -> Kind:
        """Which one is given."""
        return next(k for k in _KINDS if getattr(self, k) is not None)

    @property
    def value(self) -> float:
        """Its value."""
        value = getattr(self, self.kind)
        assert isinstance(value, float)
        return value

    @property
    def key(self) -> str:
        """Its place in a spec, such as ``target.macs``."""
        return f"target.{kebab(self.kind)}"


class StructuredRule(LayerRule):
    """Per-layer settings of ``prune-structured``, for all channels that a layer writes."""

    ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of these layers' channels that is removed, whatever the target is",
    )
