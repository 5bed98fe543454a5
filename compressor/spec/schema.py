"""The JSON Schema of a spec, made from the declarations that also check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, NoDefault, models_json_schema
from pydantic_core import core_schema

from compressor import catalog
from compressor.spec.keys import DataKeys, SpecKeys
from compressor.spec.load import FACTORY
from compressor.types.options import Options

Schema: TypeAlias = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SOURCE = "data-source"
_ROLES = ("calibration", "evaluation", "training")
_FILLED = ("path", "fields", "samples")  # options of a source that the spec fills in
_FACTORY = "package.module:function that returns batches, or an iterable of them"


def spec_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of a whole spec: every pass, export and source.

    Raises:
        SpecError: a third party's entry cannot be loaded.
    """
    passes, exporters, sources = (
        {name: catalog.load(k, name) for name in catalog.names(k)}
        for k in ("pass", "exporter", "source")
    )
    declared: list[type[Options]] = [
        SpecKeys,
        DataKeys,
        *passes.values(),
        *exporters.values(),
        *sources.values(),
    ]
    schemas, definitions = _schemas(declared)
    definitions.update(_tagged("pass", {n: schemas[c] for n, c in passes.items()}))
    definitions.update(_tagged("format", {n: schemas[c] for n, c in exporters.items()}))
    definitions.update(_sources(schemas[DataKeys], {n: schemas[c] for n, c in sources.items()}))
    definitions[_SOURCE] = {"oneOf": _references("source", (*sources, FACTORY))}
    for role in _ROLES:
        entry = definitions["DataSection"]["properties"][role]
        entry["anyOf"] = [_reference(_SOURCE), {"type": "null"}]
    # What ``ModelKeys`` checks in code: an ONNX file, or a factory and checkpoint.
    text = {key: {"type": "string"} for key in ("onnx", "factory", "checkpoint")}
    absent = {"type": "null"}
    onnx = {"onnx": text["onnx"], "factory": absent, "checkpoint": absent}
    torch = [{"required": [key], "properties": {key: text[key]}} for key in list(text)[1:]]
    definitions["ModelKeys"]["oneOf"] = [
        {"required": ["onnx"], "properties": onnx},
        {"properties": {"onnx": absent}, "anyOf": torch},
    ]
    whole = schemas[SpecKeys]
    whole["properties"]["passes"]["items"] = {"oneOf": _references("pass", passes)}
    whole["properties"]["exports"]["items"] = {"oneOf": _references("format", exporters)}
    return {"$schema": DIALECT, "title": "compressor spec", **whole, "$defs": definitions}


def schema_seen_from(folder: Path) -> str:
    """Return where editors find the schema: relative if it is in the folder, as in a ``.venv``.

    The file holds :func:`spec_schema` without other packages' entries.
    """
    path = Path(__file__).resolve().with_name("schema.json")
    if path.is_relative_to(folder):
        return quote(path.relative_to(folder).as_posix())
    return path.as_uri()


def options_schema(cls: type[Options]) -> Schema:
    """Return the JSON Schema of one declaration, nested ones in its ``$defs``."""
    schemas, definitions = _schemas([cls])
    return {**schemas[cls], "$defs": definitions}


class _Generator(GenerateJsonSchema):
    """Leaves titles out; shows what a factory makes by default, but no nested declaration."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        factory = schema.get("default_factory")
        if factory is None or schema.get("default_factory_takes_data"):
            value = super().get_default_value(schema)
        else:
            value = factory()  # type: ignore[call-arg]  # it takes no data
        return NoDefault if isinstance(value, Options) else value

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        del made["title"]
        return made


def _schemas(
    classes: Sequence[type[Options]],
) -> tuple[dict[type[Options], Schema], dict[str, Schema]]:
    references, whole = models_json_schema(
        [(cls, "validation") for cls in classes], by_alias=True, schema_generator=_Generator
    )
    definitions: dict[str, Schema] = whole["$defs"]
    schemas: dict[type[Options], Schema] = {}
    for cls in classes:
        name = str(references[cls, "validation"]["$ref"]).rpartition("/")[2]
        schemas[cls] = definitions.pop(name)
    return schemas, definitions


def _tagged(tag: str, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """Yield each declaration with the key that names it in a spec, such as ``pass: fuse``."""
    for name, schema in schemas.items():
        properties = {tag: {"const": name}, **schema.get("properties", {})}
        required = [tag, *schema.get("required", [])]
        yield f"{tag}-{name}", {**schema, "properties": properties, "required": required}


def _sources(common: Schema, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """Yield each kind of data source with the keys that all kinds have."""
    factory = {
        "description": "Batches that a function makes.",
        "properties": {"path": {"description": _FACTORY}},
    }
    for name, schema in {**schemas, FACTORY: factory}.items():
        properties = {k: v for k, v in schema["properties"].items() if k not in _FILLED}
        required = [k for k in schema.get("required", []) if k in properties]
        path = {"type": "string", "description": schema["properties"]["path"]["description"]}
        yield (
            f"source-{name}",
            {
                "type": "object",
                "description": schema.get("description", ""),
                "properties": {name: path, **properties, **common["properties"]},
                "required": [name, *required],
                "additionalProperties": False,
            },
        )


def _references(prefix: str, names: Sequence[str] | Mapping[str, Any]) -> list[Schema]:
    return [_reference(f"{prefix}-{name}") for name in names]


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}
