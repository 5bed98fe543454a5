"""Options: frozen, typed declarations whose fields are YAML keys, JSON Schema and documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from compressor.errors import SpecError
from compressor.types.option_errors import KeyPath, problems


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

    if not TYPE_CHECKING:  # checkers make a signature of the fields

        def __init__(self, /, **given: Any) -> None:
            """Check the values.

            Raises:
                SpecError: a name is unknown or missing, or a value is of the wrong type or out of
                    range; several errors come together as ``SpecErrors``.
            """
            try:
                super().__init__(**given)
            except ValidationError as error:
                cls = type(self)

                def at(path: KeyPath, problem: str, remedy: str) -> SpecError:
                    return SpecError(".".join(map(str, (cls.__name__, *path))), problem, remedy)

                raise problems(error, cls, given, at, aliases=False) from None

        # Whatever pydantic makes of the values inside a declaration, it makes without this method.
        __init__.__pydantic_base_init__ = True

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, without cached properties of the old ones."""
        made = super().model_copy(update=update, deep=deep)
        for name in made.__dict__.keys() - type(self).model_fields.keys():
            del made.__dict__[name]  # of a cached property
        return made


@dataclass(frozen=True)
class Like:
    """In ``Annotated[str, …]``: text that matches a pattern as a whole.

    Attributes:
        pattern: for editors, which read the schema.
        remedy: for people: what to write.
    """

    pattern: str
    remedy: str

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the text after the type's own checks."""
        return core_schema.no_info_after_validator_function(self._checked, handler(kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the pattern to the type's own schema."""
        return {**handler(schema), "pattern": f"^{self.pattern}$"}

    def _checked(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text, re.ASCII):
            raise ValueError(self.remedy)
        return text


class OneOf(Options):
    """Numeric options of which exactly one must be given."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = type(self).model_fields
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(map(kebab, given or names))}")
        return self

    @property
    def kind(self) -> str:
        """The name of the option that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        """The value of that option."""
        return float(getattr(self, self.kind))
