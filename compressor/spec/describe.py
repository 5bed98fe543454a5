"""Describe passes, exporters and whatever else declares options, from the declarations alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compressor import catalog
from compressor.errors import SpecError
from compressor.spec.schema import Schema, options_schema
from compressor.types.options import Options

Described = Literal["pass", "exporter"]


@dataclass(frozen=True)
class Entry:
    """One line of a list."""

    name: str
    summary: str  # the first line of its documentation
    needs: tuple[str, ...]  # what a model must offer, for passes
    problem: str = ""  # why it cannot be used; empty where it can


@dataclass(frozen=True)
class Option:
    """One key of a declaration."""

    key: str  # as in a spec
    type: str  # which values there are, in plain words
    default: str | None  # as it would be written in a spec; `None` where there is none
    required: bool
    description: str
    # the keys of the section, or of each section in a list, that the value is
    options: tuple[Option, ...] = ()


@dataclass(frozen=True)
class Description:
    """Everything about a pass or an exporter."""

    name: str
    documentation: str
    needs: tuple[str, ...]  # what a model must offer, for passes
    source: str  # paper or document that the method comes from, for passes
    options: tuple[Option, ...]


def overview(kind: Described) -> list[Entry]:
    """List what there is of a kind; what does not import is listed with the reason."""
    entries = []
    for name in catalog.names(kind):
        try:
            cls = catalog.load(kind, name)
        except SpecError as error:
            entries.append(Entry(name, "", (), error.problem))
            continue
        summary = _documentation(cls).partition("\n")[0].replace("``", "")
        entries.append(Entry(name, summary, _needs(cls)))
    return entries


def describe(kind: Described, name: str) -> Description:
    """Describe one pass or exporter.

    Raises:
        SpecError: there is no such name, or it does not import.
    """
    cls = catalog.load(kind, name)
    return Description(
        name, _documentation(cls), _needs(cls), getattr(cls, "source", ""), describe_options(cls)
    )


def describe_options(cls: type[Options]) -> tuple[Option, ...]:
    """Describe the keys of a declaration, and those nested in them."""
    schema = options_schema(cls)
    return tuple(_options(schema, schema["$defs"]))


def _documentation(cls: type[Options]) -> str:
    return inspect.getdoc(cls) or ""


def _needs(cls: type[Options]) -> tuple[str, ...]:
    return tuple(sorted(str(need) for need in getattr(cls, "needs", ())))


def _options(schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[Option]:
    required = schema.get("required", [])
    for key, value in schema.get("properties", {}).items():
        nested = _nested(value, definitions)
        yield Option(
            key=key,
            type=words(value),
            default=shown(value["default"]) if "default" in value else None,
            required=key in required,
            description=" ".join(value.get("description", "").split()),
            options=() if nested is None else tuple(_options(nested, definitions)),
        )


def _nested(schema: Any, definitions: Mapping[str, Schema]) -> Schema | None:
    """Return the first declaration that a schema refers to, at any depth."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            section = definitions[schema["$ref"].rpartition("/")[2]]
            return section if "properties" in section else None
        schema = list(schema.values())
    if not isinstance(schema, list):
        return None
    inner = (_nested(item, definitions) for item in schema)
    return next((section for section in inner if section is not None), None)


def shown(value: Any) -> str:
    """Write a value as in a spec."""
    return value if isinstance(value, str) and value else json.dumps(value)


def words(schema: Schema) -> str:
    """Return in plain words which values a schema allows.

    >>> words({"type": "integer", "minimum": 1})
    'integer (at least 1)'
    """
    parts = list(dict.fromkeys(_choices(schema)))
    return " or ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _choices(schema: Schema) -> list[str]:
    if "$ref" in schema:
        return ["section"]
    if "const" in schema:
        return [shown(schema["const"])]
    if "enum" in schema:
        return [shown(value) for value in schema["enum"]]
    if "anyOf" in schema:
        return [choice for branch in schema["anyOf"] for choice in _choices(branch)]
    match schema.get("type"):
        case "integer" | "number":
            return [schema["type"] + _bounds(schema)]
        case "boolean":
            return ["true", "false"]
        case "null":
            return ["null"]
        case "string":
            return ["path" if schema.get("format") == "path" else "text"]
        case "array":
            return [_list_words(schema)]
        case "object":
            values = schema.get("additionalProperties", True)
            return ["mapping" if values is True else f"mapping of names to {words(values)}"]
    return ["any value"]


def _list_words(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f"list of {', '.join(words(item) for item in schema['prefixItems'])}"
    item = words(schema["items"]) if schema.get("items") else "any values"
    return "list of sections" if item == "section" else f"list of {item}"


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    limits = (
        f"at least {low}" if low is not None else f"above {above}" if above is not None else "",
        f"at most {high}" if high is not None else f"below {below}" if below is not None else "",
    )
    set_limits = " and ".join(limit for limit in limits if limit)
    return f" ({set_limits})" if set_limits else ""
