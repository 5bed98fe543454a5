"""What is wrong with the values of a declaration, with one message for each cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from compressor.errors import SpecError, close_names, suggestion

KeyPath: TypeAlias = tuple[str | int, ...]
Located: TypeAlias = Callable[[KeyPath, str, str], SpecError]


class SpecErrors(SpecError):
    """Several independent errors of one spec."""

    def __init__(self, errors: list[SpecError]):
        self.errors = tuple(errors)
        first = errors[0]
        super().__init__(first.subject, first.problem, first.remedy, where=first.where)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def problems(
    error: ValidationError,
    cls: type[BaseModel],
    value: Any,
    at: Located,
    base: KeyPath = (),
    *,
    aliases: bool = True,
) -> SpecError:
    """Translate pydantic's errors: one message for each cause.

    Args:
        cls: what was to be made of the value.
        at: returns the error for a place, a problem and a remedy.
        base: where the value stands.
        aliases: keys are to be written as in a file, and not as in Python.
    """
    by_path: dict[KeyPath, SpecError] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"], value, absent=detail["type"] == "missing")
        # The branches of a union each complain: one cause, one message. Whichever has looked at how
        # the keys go together is the branch that was meant.
        if path not in by_path or detail["type"] == "value_error":
            by_path[path] = _translate(detail, path, cls, at, base, aliases=aliases)
    # What is wrong inside a value makes the value wrong too: a list too short, no branch to take.
    inner = [p for p in by_path if not any(q != p and q[: len(p)] == p for q in by_path)]
    misspelt = _misspelt(error, inner)
    errors = [by_path[p] for p in inner if p not in misspelt]
    return errors[0] if len(errors) == 1 else SpecErrors(errors)


def _misspelt(error: ValidationError, paths: Collection[KeyPath]) -> set[KeyPath]:
    """Return the keys that are missing since one beside them is misspelt, which is one cause."""
    kinds = {detail["loc"][-1:]: detail["type"] for detail in error.errors(include_url=False)}
    missing = [p for p in paths if kinds.get(p[-1:]) == "missing"]
    strange = [p for p in paths if kinds.get(p[-1:]) == "extra_forbidden"]
    return {
        path
        for path in missing
        for other in strange
        if path[:-1] == other[:-1] and close_names(str(other[-1]), [str(path[-1])], 1)
    }


def _real_path(loc: tuple[int | str, ...], value: Any, *, absent: bool) -> KeyPath:
    """Drop the parts of a location that name a union's branch and not a key.

    Args:
        loc: pydantic's location of an error in ``value``.
        value: what was validated.
        absent: the location's last part is a key that is missing.
    """
    path: list[str | int] = []
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(value, Mapping) and isinstance(part, str):
            if part in value:
                value = value[part]
            elif not (last and absent):
                continue
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(part, str):
            continue
        path.append(part)
    return tuple(path)


def _translate(
    detail: ErrorDetails,
    path: KeyPath,
    cls: type[BaseModel],
    at: Located,
    base: KeyPath,
    *,
    aliases: bool,
) -> SpecError:
    kind = detail["type"]
    if kind == "extra_forbidden" and not path:  # a key such as "", which names no place
        path = (str(detail["loc"][-1]),)
    full = (*base, *path)
    if kind == "extra_forbidden":
        key, around = str(path[-1]), _options_at(cls, path[:-1])
        keys = keys_of(around) if aliases or around is None else list(around.model_fields)
        remedy = _deeper(key, around) or suggestion(key, keys)
        return at(full, "is not a known key", remedy)
    if kind == "missing":
        return at(full, "is missing", f"add {path[-1] if path else 'it'!s}")
    context = detail.get("ctx", {})
    if kind == "value_error" and isinstance(detail["input"], Mapping) and "; " in detail["msg"]:
        # Keys that do not fit together: the message says what is wrong, and then the remedy.
        problem, _, remedy = detail["msg"].removeprefix("Value error, ").partition("; ")
        return at(full, problem, remedy)
    if kind == "literal_error":
        remedy = f"use {context.get('expected', 'another value')}"
    elif kind in ("bool_type", "bool_parsing"):
        remedy = "use true or false"
    elif kind == "too_short":
        remedy = f"give at least {context.get('min_length', 1)}"
    else:
        remedy = detail["msg"][:1].lower() + detail["msg"][1:]
        remedy = remedy.removeprefix("value error, ").replace("input should be", "it must be")
    return at(full, f"is {shown(detail['input'])}", remedy)


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _deeper(key: str, cls: type[BaseModel] | None) -> str:
    """Return where a key of just that name stands one level deeper; empty if nowhere."""
    below = []
    for name, field in () if cls is None else cls.model_fields.items():
        nested, place = nested_options(field.annotation), field.alias or name
        if nested is not None and key in keys_of(nested):
            listed = isinstance(field.default, tuple)
            below.append(f"in an entry of {place}" if listed else f"as {place}.{key}")
    return f"write it {' or '.join(below)}" if below else ""


def _options_at(cls: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    current: type[BaseModel] | None = cls
    named = False  # the next part is a name of the user's
    for part in path:
        if isinstance(part, int) or current is None or named:
            named = False
            continue
        fields = current.model_fields.items()
        field = next((f for name, f in fields if part in (f.alias, name)), None)
        named = field is not None and get_origin(field.annotation) is dict
        current = None if field is None else nested_options(field.annotation)
    return current


def keys_of(cls: type[BaseModel] | None) -> list[str]:
    """Return the keys of a declaration, as a spec has them; none of none."""
    return [] if cls is None else [f.alias or name for name, f in cls.model_fields.items()]


def nested_options(annotation: Any) -> type[BaseModel] | None:
    """Return the declaration inside an annotation such as ``tuple[X, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        inner = nested_options(argument)
        if inner is not None:
            return inner
    return None
