"""The JSON Schema accepts what ``load_spec`` accepts, and refuses what it refuses."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

import samples
from compressor import catalog
from compressor.cli.application import application
from compressor.errors import SpecError
from compressor.spec.load import load_spec
from compressor.spec.schema import options_schema, spec_schema
from compressor.spec.source_text import override, read_document
from compressor.types.options import Options

SAMPLES = Path(samples.__file__).parent
SPECS = sorted(SAMPLES.glob("*/spec.yaml"))
DIGITS = SAMPLES / "digits" / "spec.yaml"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = spec_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def document(path: Path, *settings: str) -> Any:
    return override(read_document(path), settings).value


def accepted(*settings: str) -> bool:
    try:
        load_spec(DIGITS, settings)
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.parent.name)
def test_samples_are_valid(path: Path, validator: Draft202012Validator) -> None:
    assert [error.message for error in validator.iter_errors(document(path))] == []


@pytest.mark.parametrize(
    "setting",
    [
        "metric=null",
        "metric={function: pkg.mod:fn, higher-is-better: false}",
        "limits.size-ratio=null",
        "limits={}",
        "passes=[]",
        "passes.1.layers=[{match: head, skip: true}, {match: stem, bits: 4}]",
        "passes.1.activations.symmetric=auto",
        "passes.1.activations.percentile=99.9",
        "exports=[{format: onnx, external-data: always}]",
        "data.training=null",
        "data.calibration={factory: pkg.mod:fn, batch: 8}",
        "data.calibration={images: ., size: [8, 8]}",
        "data.calibration={images: ., resize: 9, crop: [8, 8], mean: 0, std: [1, 0.5, 2]}",
        "data.calibration={images: ., resize: {letterbox: [9, 9], fill: 114}, colour: bgr}",
        "data.calibration={images: ., preprocessor: nowhere, layout: channels-first}",
        "model={onnx: m.onnx}",
        "model={checkpoint: digits.pt}",
        "model.config={width: 8, deep: {er: [1]}}",
        "model.inputs.image={shape: [1, batch, 8]}",
    ],
)
def test_what_loads_is_valid(setting: str, validator: Draft202012Validator) -> None:
    assert accepted(setting)
    assert [error.message for error in validator.iter_errors(document(DIGITS, setting))] == []


@pytest.mark.parametrize(
    "setting",
    [
        "version=2",
        "version=null",
        "nmae=digits",
        "name=no/slashes",
        "name=3",
        "seed=-1",
        "seed=0.5",
        "seed=true",
        "model={}",
        "model={onnx: m.onnx, checkpoint: digits.pt}",
        "model={config: {}}",
        "model.inputs.image={dtype: float32}",
        "model.inputs.image={shape: [0, 3]}",
        "model.inputs.image={shape: [3], dtype: float31}",
        "passes={}",
        "passes.0.pass=fusse",
        "passes.0=fuse",
        "passes.0={batch-norm: true}",
        "passes.0.batch_norm=true",
        "passes.0.batch-norm=sometimes",
        "passes.1.weights.bits=7",
        "passes.1.weights.bits='8'",
        "passes.1.activations.observer=entropie",
        "passes.1.activations.percentile=50",
        "passes.1.activations.percentile=100.1",
        "passes.1.layers=[{bits: 4}]",
        "exports=[]",
        "exports.1.format=onxx",
        "exports.1.opset=3",
        "exports.1.traget=ort-cpu",
        "data.calibration.npy=train.npz",
        "data.calibration={inputs: {image: image}}",
        "data.calibration={images: ., size: [8]}",
        "data.calibration={images: ., resize: [8], crop: 8}",
        "data.calibration={images: ., resize: {letterbox: 8}}",
        "data.calibration={images: ., size: [8, 8], interpolation: cubic}",
        "data.calibration={images: ., size: [8, 8], mean: []}",
        "data.calibration={images: ., size: [8, 0]}",
        "data.calibration={npz: train.npz, size: [8, 8]}",
        "data.calibration={npz: train.npz, path: train.npz}",
        "data.calibration={npz: train.npz, fields: {}}",
        "data.calibration={factory: pkg.mod:fn, size: [8, 8]}",
        "data.calibration.samples=0",
        "data.calibration.batch=0",
        "data.testing={npz: train.npz}",
        "limits.size-ratio=0",
        "limits.size_ratio=0.5",
        "metric=[accuracy]",
        "output=3",
    ],
)
def test_what_does_not_load_is_not_valid(setting: str, validator: Draft202012Validator) -> None:
    assert not accepted(setting)
    assert not validator.is_valid(document(DIGITS, setting))


def every(kind: catalog.Kind) -> list[tuple[str, type[Options]]]:
    return [(name, catalog.load(kind, name)) for name in catalog.names(kind)]


@pytest.mark.parametrize(("kind", "tag"), [("pass", "pass"), ("exporter", "format")])
def test_every_option_is_in_the_schema_and_documented(kind: catalog.Kind, tag: str) -> None:
    definitions = spec_schema()["$defs"]
    for name, cls in every(kind):
        entry = definitions[f"{tag}-{name}"]
        keys = {field.alias for field in cls.model_fields.values()}
        assert entry["properties"].keys() == keys | {tag}
        assert entry["properties"][tag] == {"const": name}
        assert entry["additionalProperties"] is False
        undocumented = [k for k in keys if not entry["properties"][k].get("description")]
        assert undocumented == [], name


def test_references_lead_somewhere_and_nothing_is_left_over() -> None:
    schema = spec_schema()
    found: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                found.add(value["$ref"].removeprefix("#/$defs/"))
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(schema)
    assert found == set(schema["$defs"])


def test_defaults_that_a_factory_makes_are_shown() -> None:
    schema = options_schema(dict(every("source"))["npz"])
    assert schema["properties"]["fields"]["default"] == {}


def test_the_file_in_the_package_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(application, ["schema"]).stdout
    file = files("compressor.spec") / "schema.json"
    assert file.read_text(encoding="utf-8") == printed, "run python docs/generate.py"
