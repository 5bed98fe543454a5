"""What a wrong spec is told, word for word: file and line, key, value, remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from compressor import catalog
from compressor.errors import ExitCode, SpecError
from compressor.spec.load import Spec, load_spec
from compressor.types.option_errors import SpecErrors

SPEC = """\
version: 1
name: tiny
seed: 3
model:
  onnx: tiny.onnx
data:
  calibration: {npz: data.npz, inputs: {image: x}}
passes:
  - pass: fuse
  - pass: quantize-static
    weights: {bits: 8}
    layers:
      - {match: conv*, skip: true}
exports:
  - format: onnx
    opset: 21
limits:
  size-ratio: 0.5
"""

FORMATS, SOURCES = (", ".join(catalog.names(kind)) for kind in ("exporter", "source"))

Load = Callable[..., Spec]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write a spec and load it from the current folder, so that messages name it shortly."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.npz").touch()

    def write_and_load(text: str, *settings: str) -> Spec:
        Path("spec.yaml").write_text(text, encoding="utf-8")
        return load_spec(Path("spec.yaml"), settings)

    return write_and_load


def refusal(load: Load, text: str, *settings: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(text, *settings)
    assert caught.value.exit_code is ExitCode.BAD_SPEC
    return str(caught.value)


def test_the_spec_itself_is_fine(load: Load):
    spec = load(SPEC)
    assert [p.name for p in spec.passes] == ["fuse", "quantize-static"]
    assert spec.where("passes", 1, "weights", "bits") == "spec.yaml:11"
    assert spec.where("exports", 0, "target") == "spec.yaml:15"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "seed: 3",
            "sed: 3",
            "spec.yaml:3: sed: is not a known key; did you mean 'seed'?",
        ),
        (
            "seed: 3",
            "zzz: 3",
            "spec.yaml:3: zzz: is not a known key; there is: data, exports, limits, metric, "
            "model, name, output, passes, seed, version",
        ),
        (
            "  onnx: tiny.onnx",
            "  onxn: tiny.onnx",
            "spec.yaml:5: model.onxn: is not a known key; did you mean 'onnx'?",
        ),
        (
            "weights: {bits: 8}",
            "weights: {bit: 8}",
            "spec.yaml:11: passes.1.weights.bit: is not a known key; did you mean 'bits'?",
        ),
        (
            "skip: true",
            "skipp: true",
            "spec.yaml:13: passes.1.layers.0.skipp: is not a known key; did you mean 'skip'?",
        ),
        (
            "skip: true",
            "bits: 5",
            "spec.yaml:13: passes.1.layers.0.bits: is 5; use 8, 4, 3 or 2",
        ),
        (
            "match: conv*, ",
            "",
            "spec.yaml:13: passes.1.layers.0.match: is missing; add match",
        ),
        (
            "match: conv*, ",
            "mach: conv*, ",
            "spec.yaml:13: passes.1.layers.0.mach: is not a known key; did you mean 'match'?",
        ),
        (
            "  onnx: tiny.onnx",
            "  onnx: tiny.onnx\n  inputs: {image: {shap: [1, 3]}}",
            "spec.yaml:6: model.inputs.image.shap: is not a known key; did you mean 'shape'?",
        ),
        (
            "pass: fuse",
            "pas: fuse",
            "spec.yaml:9: passes.0.pas: is not a known key; did you mean 'pass'?",
        ),
        (
            "seed: 3",
            f"seed: {1 << 63}",
            "spec.yaml:3: seed: has more than 63 bits; give a smaller number",
        ),
        (
            "pass: fuse",
            "pass: fuze",
            "spec.yaml:9: pass 'fuze': is not known; did you mean 'fuse'?",
        ),
        (
            "format: onnx",
            "format: onxn",
            "spec.yaml:15: exporter 'onxn': is not known; did you mean 'onnx'?",
        ),
        (
            "  - format: onnx\n    opset: 21",
            "  - opset: 21",
            f"spec.yaml:15: exports.0: has no 'format'; there are: {FORMATS}",
        ),
        (
            "opset: 21",
            "opset: new",
            'spec.yaml:16: exports.0.opset: is "new"; it must be a valid integer',
        ),
        (
            "opset: 21",
            "target: tpu",
            "spec.yaml:16: exports.0.target: is \"tpu\"; use 'ort-cpu', 'ort-cuda', 'openvino' or "
            "'tensorrt'",
        ),
        (
            "size-ratio: 0.5",
            "size-ratio: 0",
            "spec.yaml:18: limits.size-ratio: is 0; it must be greater than 0",
        ),
        (
            "size-ratio: 0.5",
            "size-ratio: .nan",
            "spec.yaml:18: limits.size-ratio: is NaN; it must be a finite number",
        ),
        ("seed: 3", "seed: -3", "spec.yaml:3: seed: is -3; it must be greater than or equal to 0"),
        ("seed: 3", "seed: 3.0", "spec.yaml:3: seed: is 3.0; it must be a valid integer"),
        ("seed: 3", 'seed: "3"', 'spec.yaml:3: seed: is "3"; it must be a valid integer'),
        (
            "pass: fuse",
            "pass: prune-structured\n    target: {ratio: 0.5}\n    reconstruct: sometimes",
            'spec.yaml:11: passes.0.reconstruct: is "sometimes"; use true or false',
        ),
        ("version: 1", "version: 2", "spec.yaml:1: version: is 2; use 1"),
        ("version: 1", "version: true", "spec.yaml:1: version: is true; use 1"),
        ("bits: 8", "bits: 8.0", "spec.yaml:11: passes.1.weights.bits: is 8.0; use 8"),
        ("version: 1", "version: 1.0", "spec.yaml:1: version: is 1.0; use 1"),
        ("version: 1\n", "", "spec.yaml: version: is missing; add version"),
        ("name: tiny", "name: 12", "spec.yaml:2: name: is 12; it must be a valid string"),
        ("name: tiny", "name:", "spec.yaml:2: name: is null; it must be a valid string"),
        (
            "name: tiny",
            "name: a/b",
            "spec.yaml:2: name: is \"a/b\"; use letters from a to z, digits, '.', '_' and '-', "
            "with a letter or a digit first",
        ),
        (
            "name: tiny",
            "name: größe",
            "spec.yaml:2: name: is \"größe\"; use letters from a to z, digits, '.', '_' and '-', "
            "with a letter or a digit first",
        ),
        (
            "npz: data.npz",
            "npz: data.npz, fold: 0/4",
            'spec.yaml:7: data.calibration.fold: is "0/4"; write it like 2/4; it counts from 1',
        ),
        (
            "exports:\n  - format: onnx\n    opset: 21",
            "exports: []",
            "spec.yaml:14: exports: is []; give at least 1",
        ),
        (
            "exports:\n  - format: onnx\n    opset: 21",
            "exports: [onnx]",
            'spec.yaml:14: exports.0: is "onnx"; it must be an object',
        ),
        (
            "  onnx: tiny.onnx",
            "  {}",
            "spec.yaml:4: model: is {}; set onnx, or factory and checkpoint, or checkpoint",
        ),
        (
            "  onnx: tiny.onnx",
            "  {onnx: a.onnx, checkpoint: b.pt}",
            'spec.yaml:4: model: is {"onnx": "a.onnx", "checkpoint": "b.pt"}; '
            "set either onnx, or factory and checkpoint, not both",
        ),
        (
            "npz: data.npz",
            "npz: gone.npz",
            "spec.yaml:7: data.calibration.npz: 'FOLDER/gone.npz' does not exist; correct the path",
        ),
        (
            "npz: data.npz",
            "npz: 3",
            "spec.yaml:7: data.calibration.npz: is 3; give a string",
        ),
        (
            "npz: data.npz",
            "nzp: data.npz",
            "spec.yaml:7: data.calibration: names no source; did you mean 'npz'?",
        ),
        (
            "npz: data.npz",
            "npz: data.npz, npy: data.npy",
            "spec.yaml:7: data.calibration: names 'npz', 'npy' together; "
            f"give one of {SOURCES}, factory",
        ),
        (
            "npz: data.npz",
            "npz: data.npz, bach: 3",
            "spec.yaml:7: data.calibration.bach: is not a known key; did you mean 'batch'?",
        ),
        (
            "npz: data.npz",
            "npz: data.npz, batch: 0",
            "spec.yaml:7: data.calibration.batch: is 0; it must be greater than or equal to 1",
        ),
        (
            "npz: data.npz",
            "factory: a.b:c, shuffle: 3",
            "spec.yaml:7: data.calibration.shuffle: is not a known key; "
            "there is: batch, feeds, fold, inputs, samples, state, target, transform",
        ),
    ],
)
def test_message(load: Load, tmp_path: Path, old: str, new: str, message: str):
    assert SPEC.count(old) == 1
    found = refusal(load, SPEC.replace(old, new))
    assert found.replace(str(tmp_path), "FOLDER") == message


def test_independent_errors_come_together_and_in_full(load: Load):
    text = (
        SPEC.replace("seed: 3", "sed: 3")
        .replace("pass: fuse", "pass: fuze")
        .replace("bits: 8", "bits: nine")
        .replace("opset: 21", "opsett: 21")
        .replace("npz: data.npz", "npz: data.npz, bach: 3")
        .replace("size-ratio: 0.5", "size-ratio: small")
    )
    with pytest.raises(SpecErrors) as caught:
        load(text)
    assert str(caught.value).splitlines() == [
        'spec.yaml:18: limits.size-ratio: is "small"; it must be a valid number',
        "spec.yaml:3: sed: is not a known key; did you mean 'seed'?",
        "spec.yaml:9: pass 'fuze': is not known; did you mean 'fuse'?",
        'spec.yaml:11: passes.1.weights.bits: is "nine"; use 8, 4, 3 or 2',
        "spec.yaml:16: exports.0.opsett: is not a known key; did you mean 'opset'?",
        "spec.yaml:7: data.calibration.bach: is not a known key; did you mean 'batch'?",
    ]
    assert len(caught.value.errors) == 6
    assert caught.value.where == "spec.yaml:18"


def test_every_role_of_data_is_looked_at(load: Load):
    text = SPEC.replace(
        "  calibration: {npz: data.npz, inputs: {image: x}}",
        "  calibration: {npz: a.npz}\n  evaluation: {npz: b.npz}\n  training: {}",
    )
    lines = refusal(load, text).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"spec.yaml:{n}" for n in (7, 8, 9)]


def test_a_wrong_value_of_a_union_gives_one_message(load: Load):
    text = SPEC + "metric: {function: [3]}\n"
    message = "spec.yaml:19: metric.function: is [3]; it must be a valid string"
    assert refusal(load, text) == message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("name: top5, function: a:b", 'is {"name": "top5", "function": "a:b"}; set either name or'),
        (
            "name: accuracy, higher-is-better: false",
            "sets higher-is-better for 'accuracy', whose direction is known; remove it, or give a "
            "function of your own",
        ),
    ],
)
def test_keys_of_a_union_that_do_not_fit_together(load: Load, keys: str, message: str):
    """The other branch, which is of text, was blamed: it must be a valid string."""
    text = f"{SPEC}metric: {{{keys}}}\n"
    assert refusal(load, text).startswith(f"spec.yaml:19: metric: {message}")


def test_a_metric_of_the_users_own_has_a_direction(load: Load):
    for key in ("name", "function"):
        load(SPEC, f"metric={{{key}: 'pkg.mod:fn', higher-is-better: false}}")


def test_unknown_keys_in_a_mapping_that_holds_a_wrong_value_too(load: Load):
    text = SPEC.replace("weights: {bits: 8}", "weights: {bits: x, granular: y}")
    assert refusal(load, text).splitlines() == [
        'spec.yaml:11: passes.1.weights.bits: is "x"; use 8, 4, 3 or 2',
        "spec.yaml:11: passes.1.weights.granular: is not a known key; did you mean 'granularity'?",
    ]


def test_a_variable_that_several_sections_need_is_missed_once(
    load: Load, monkeypatch: pytest.MonkeyPatch
):
    """Sources of data look into the model's folder, too."""
    monkeypatch.delenv("MODELS", raising=False)
    assert refusal(load, SPEC.replace("tiny.onnx", "$MODELS/tiny.onnx")) == (
        "spec.yaml:5: model.onnx: uses the environment variable MODELS, which is not set; "
        "export MODELS=/path, or write $$ for a dollar sign"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", "--set seed: is not key=value; write passes.1.epochs=5"),
        ("=3", "--set =3: is not key=value; write passes.1.epochs=5"),
        ("", "--set : is not key=value; write passes.1.epochs=5"),
        ("seed=[", "--set seed=[: has a malformed value; quote it"),
        (
            "passes.2.bits=4",
            "--set passes.2.bits=4: passes.2 does not exist; lists count from 0",
        ),
        (
            "passes.first=4",
            "--set passes.first=4: passes.first does not exist; lists count from 0",
        ),
        (
            'output="a\\0b"',
            '--set output="a\\0b": output: holds a null character; remove it',
        ),
        (
            f"seed={1 << 63}",
            f"--set seed={1 << 63}: seed: has more than 63 bits; give a smaller number",
        ),
        (
            f"model=[{1 << 70:#x}]",
            f"--set model=[{1 << 70:#x}]: model.0: has more than 63 bits; give a smaller number",
        ),
        ("passes.-1=4", "--set passes.-1=4: passes.-1 does not exist; lists count from 0"),
        (
            "name.x=4",
            "--set name.x=4: name.x does not exist; name is a single value, without keys",
        ),
        ("sed=4", "--set sed=4: sed: is not a known key; did you mean 'seed'?"),
        (
            "limits.size-ratio=big",
            '--set limits.size-ratio=big: limits.size-ratio: is "big"; it must be a valid number',
        ),
        (
            "passes.1.weights.bits=5",
            "--set passes.1.weights.bits=5: passes.1.weights.bits: is 5; use 8, 4, 3 or 2",
        ),
    ],
)
def test_wrong_setting(load: Load, setting: str, message: str):
    assert refusal(load, SPEC, setting) == message


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("rounding: reconstruct", "write it as weights.rounding"),
        ("observer: mse", "write it as activations.observer"),
        ("skip: true", "write it in an entry of layers"),
    ],
)
def test_a_key_that_stands_one_level_deeper(load: Load, key: str, remedy: str):
    text = SPEC.replace("    weights: {bits: 8}", f"    {key}")
    said = f"passes.1.{key.partition(':')[0]}: is not a known key; {remedy}"
    assert refusal(load, text) == f"spec.yaml:11: {said}"
