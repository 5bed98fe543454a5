"""Options: frozen, typed declarations whose fields are YAML keys, JSON Schema and documentation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


def kebab(field: str) -> str:
    """Return the YAML key of a field: ``round_to`` is written ``round-to``."""
    return field.replace("_", "-")


class Options(BaseModel):
    """Base of everything a user writes in a spec.

    Unknown keys are refused, types are not coerced, and instances never change. A field's
    ``description`` is its documentation on the command line, in the schema and in ``docs/``.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=kebab,
        validate_by_name=True,
        validate_by_alias=True,
        validate_default=True,
        allow_inf_nan=False,
    )
