"""Turn values into typed declarations, with one message for each cause."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from compressor.errors import SpecError
from compressor.spec.source_text import Document, dotted
from compressor.types.option_errors import KeyPath, problems, shown
from compressor.types.options import Options

OptionsT = TypeVar("OptionsT", bound=Options)


def validate(cls: type[OptionsT], value: Any, document: Document, path: KeyPath) -> OptionsT:
    """Build ``cls`` from a plain value that stands at ``path`` of the document.

    Raises:
        SpecError: a key is unknown or missing, or a value is of the wrong type or out of range.
    """
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError) as error:
        raise SpecError(dotted(path), str(error), "use plain YAML values") from error
    try:
        made = cls.model_validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise problems(error, cls, value, document.error, path) from None
    _check_choices(made, value, document, path)
    return made


def _check_choices(made: Any, value: Any, document: Document, path: KeyPath) -> None:
    """Check that numbers among words are written as numbers of their type.

    Python takes ``True`` and ``1.0`` for equal to 1, and so does a ``Literal``.

    Args:
        made: what a value has become.

    Raises:
        SpecError: a value is not.
    """
    if isinstance(made, Options) and isinstance(value, Mapping):
        for name, field in type(made).model_fields.items():
            key = field.alias or name
            if key in value:
                _check_choices(getattr(made, name), value[key], document, (*path, key))
    elif isinstance(made, list | tuple) and isinstance(value, list):
        for index, (one, given) in enumerate(zip(made, value, strict=False)):
            _check_choices(one, given, document, (*path, index))
    elif type(made) is int and type(value) in (bool, float):
        raise document.error(path, f"is {shown(value)}", f"use {made}")
