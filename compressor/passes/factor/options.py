"""Options of ``low-rank``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from compressor.types.options import Options
from compressor.types.passes import LayerRule

Rank: TypeAlias = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]
Kind: TypeAlias = Literal["macs", "parameters"]

_KINDS: tuple[Kind, ...] = ("macs", "parameters")


class SizeTarget(Options):
    """How much of the model is to remain; exactly one of them."""

    macs: float | None = Field(
        default=None, gt=0, lt=1, description="multiply-accumulates that remain, as a share"
    )
    parameters: float | None = Field(
        default=None, gt=0, lt=1, description="weights that remain, as a share"
    )

    @model_validator(mode="after")
    def _one(self) -> SizeTarget:
        given = [k for k in _KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}")
        return self

    @property
    def kind(self) -> Kind:
        """Which one is given."""
        return "parameters" if self.macs is None else "macs"

    @property
    def value(self) -> float:
        """Its value."""
        value = self.parameters if self.macs is None else self.macs
        assert value is not None
        return value

    @property
    def key(self) -> str:
        """Its place in a spec, such as ``target.macs``."""
        return f"target.{self.kind}"


class LowRankRule(LayerRule):
    """Per-layer settings of ``low-rank``."""

    rank: Rank | None = Field(
        default=None,
        description="these layers' rank, whatever the pass says: a number (16), or a share (0.25) "
        "of the full rank",
    )
