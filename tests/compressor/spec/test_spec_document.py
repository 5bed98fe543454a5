"""How a spec's text becomes values: YAML 1.2, overrides, paths, and files that are none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compressor.errors import SpecError
from compressor.spec.load import Spec, load_spec
from compressor.spec.source_text import Document, override, read_document, seen_from

SPEC = """\
version: 1
name: tiny
model: {onnx: tiny.onnx}
exports:
  - {format: onnx, opset: 21}
"""

Load = Callable[..., Spec]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def write_and_load(text: str | bytes, *settings: str) -> Spec:
        content = text.encode() if isinstance(text, str) else text
        Path("spec.yaml").write_bytes(content)
        return load_spec(Path("spec.yaml"), settings)

    return write_and_load


def refusal(load: Load, text: str | bytes) -> str:
    with pytest.raises(SpecError) as caught:
        load(text)
    return str(caught.value)


def test_defaults(load: Load, tmp_path: Path):
    spec = load(SPEC)
    assert (spec.seed, spec.metric, spec.passes, dict(spec.data)) == (0, None, (), {})
    limits = ("metric_drop", "size_ratio", "latency_ratio")
    assert [getattr(spec.limits, name) for name in limits] == [1.0, 1.0, 1.0]
    assert all(spec.limits.is_default(name) for name in limits)
    assert spec.output == tmp_path / "out" / "tiny"
    assert (spec.onnx, spec.checkpoint) == (tmp_path / "tiny.onnx", None)


def test_the_resolved_spec_names_every_option(load: Load):
    resolved = load(SPEC + "passes: [{pass: cast}]\n").resolved
    (export,) = resolved["exports"]
    assert export.items() >= {"format": "onnx", "opset": 21, "external-data": "auto"}.items()
    assert resolved["passes"][0]["pass"] == "cast"
    assert resolved["passes"][0]["weights-only"] is False
    assert resolved["limits"]["metric-drop"] == 1.0


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("5e2", 500.0),
        (".5", 0.5),
        ("-1", -1.0),
        ("0x10", 16.0),
        ("0o17", 15.0),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_are_those_of_yaml_1_2(load: Load, written: str, value: float | None):
    spec = load(SPEC + f"limits:\n  metric-drop: {written}\n")
    assert spec.limits.metric_drop == value
    assert not spec.limits.is_default("metric_drop")


@pytest.mark.parametrize("word", ["yes", "on", "1:30", "2020-01-01", "1e-4x"])
def test_words_that_only_yaml_1_1_converts_stay_words(load: Load, word: str):
    assert refusal(load, SPEC + f"seed: {word}\n") == (
        f'spec.yaml:6: seed: is "{word}"; it must be a valid integer'
    )
    assert load(SPEC.replace("name: tiny", "name: yes")).name == "yes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; see compress init"),
        ("# later\n", "spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; "),
        ("- a\n", "spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; "),
        ("just words\n", "spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; "),
        (
            "version: 1\n\tname: x\n",
            "spec.yaml:2: YAML: found character '\\t' that cannot start any token; "
            "check indentation, brackets and quotes",
        ),
        (
            "version: 1\ndata: {evaluation: {npz: ${HERE}/test.npz}}\n",
            "spec.yaml:2: YAML: expected ',' or '}', but got '{'; "
            "write a path with ${NAME} in quotes",
        ),
        (
            SPEC + "name: other\n",
            'spec.yaml:6: YAML: found duplicate key "name" with value "other" '
            '(original value: "tiny"); ',
        ),
        (
            SPEC.replace("{onnx: tiny.onnx}", "{onnx: a.onnx, onnx: b.onnx}"),
            'spec.yaml:3: YAML: found duplicate key "onnx" with value "b.onnx" ',
        ),
        (
            SPEC + "---\nname: x\n",
            "spec.yaml:6: YAML: expected a single document in the stream, "
            "but found another document; ",
        ),
        (SPEC + "passes: [a\n", "spec.yaml:7: YAML: "),
        (
            b"name: \xff\n",
            "spec 'spec.yaml': is not text in UTF-8 (invalid start byte at byte 6); save it as "
            "UTF-8, or if it is a model: compress init spec.yaml writes a spec for it",
        ),
        (SPEC.encode("utf-16"), "spec 'spec.yaml': is not text in UTF-8 ("),
        ("name: \0\n", "spec.yaml: YAML: unacceptable character #x0000: "),
    ],
)
def test_files_that_are_no_spec(load: Load, text: str | bytes, message: str):
    assert refusal(load, text).startswith(message)


@pytest.mark.parametrize("path", ["gone.yaml", "spec.yaml/below"])
def test_paths_that_are_no_file(load: Load, path: str):
    load(SPEC)
    with pytest.raises(SpecError, match="does not exist; give the path of a YAML file"):
        load_spec(Path(path))


def test_a_folder_is_no_file(load: Load):
    load(SPEC)
    with pytest.raises(SpecError, match=r"is a folder; give a YAML file; compress init \. writes"):
        load_spec(Path())


def test_a_byte_order_mark_is_skipped(load: Load):
    assert load(b"\xef\xbb\xbf" + SPEC.encode()).name == "tiny"


def test_tags_run_nothing_and_do_not_upset_line_numbers(load: Load, tmp_path: Path):
    made = tmp_path / "made"
    text = SPEC + f'seed: !!python/object/apply:os.system ["touch {made}"]\n'
    assert refusal(load, text).startswith('spec.yaml:6: seed: is ["touch ')
    assert not made.exists()
    assert refusal(load, SPEC + "seed: !thing 3\n").startswith('spec.yaml:6: seed: is "3"; ')


def test_anchors_and_merge_keys(load: Load):
    text = SPEC.replace("{onnx: tiny.onnx}", "&m {onnx: tiny.onnx}")
    merged = text.replace("opset: 21}", "<<: *m}")
    message = "spec.yaml:5: exports.0.onnx: is not a known key; there is: external-data, "
    assert refusal(load, merged).startswith(message)


def test_settings_reach_into_lists_and_mappings(load: Load):
    text = SPEC + "passes:\n  - {pass: cast}\n  - {pass: fuse}\nlimits:\n"
    spec = load(
        text,
        "exports.0.opset=17",
        "passes.0.weights-only=true",
        "passes.0.layers=[{match: a, skip: true}]",
        "passes.0.layers.0.match=b*",
        "limits.metric-drop=1e-2",
        "limits.size-ratio=",
        "metric=a.b:c",
        "name=2x",
    )
    resolved = spec.resolved
    assert resolved["exports"][0]["opset"] == 17
    assert resolved["passes"][0]["weights-only"] is True
    assert resolved["passes"][0]["layers"] == [{"match": "b*", "skip": True}]
    assert (spec.limits.metric_drop, spec.limits.size_ratio) == (0.01, None)
    assert (spec.metric, spec.name) == ("a.b:c", "2x")


def test_settings_make_keys_and_replace_whole_values(load: Load):
    spec = load(SPEC, "limits.metric-drop=2", "exports=[{format: safetensors}]", "passes=[]")
    assert spec.limits.metric_drop == 2
    assert [e.format for e in spec.exports] == ["safetensors"]


def test_the_last_setting_wins_and_values_may_hold_an_equals_sign(load: Load):
    assert load(SPEC, "seed=1", "seed=2").seed == 2
    assert load(SPEC, "model.onnx=a=b.onnx").onnx == load(SPEC).folder / "a=b.onnx"


def test_a_value_from_a_setting_is_blamed_on_the_setting(load: Load):
    load(SPEC)
    document = read_document(Path("spec.yaml"))
    here = document.where(("exports", 0, "opset"))
    changed = override(document, ["exports.0.opset=17", "limits={size-ratio: 2}", "new.key=1"])
    assert changed.where(("exports", 0, "opset")) == "--set exports.0.opset=17"
    assert changed.where(("limits", "size-ratio")) == "--set limits={size-ratio: 2}"
    assert changed.where(("new", "key", 0)) == "--set new.key=1"
    assert changed.where(("exports", 0, "format")) == document.where(("exports", 0, "format"))
    assert document.where(("exports", 0, "opset")) == here != "--set exports.0.opset=17"
    whole = override(changed, ["exports=[{format: onnx}]"])
    assert whole.where(("exports", 0, "opset")) == "--set exports=[{format: onnx}]"


def test_settings_leave_the_document_as_it_was(load: Load):
    load(SPEC)
    document = read_document(Path("spec.yaml"))
    changed = override(document, ["exports.0.opset=17", "seed=5"])
    assert changed.value["exports"][0]["opset"] == 17
    assert document.value["exports"][0]["opset"] == 21
    assert "seed" not in document.value


def test_settings_reach_below_text_that_is_short_for_a_section():
    """``metric: accuracy`` is short for ``{name: accuracy}``."""
    quantize = {"pass": "quantize-static", "activations": {"observer": "moving-average"}}
    document = Document(Path("spec.yaml"), {"metric": "accuracy", "passes": [quantize]})
    below = "passes.0.activations.observer"
    value = override(document, ["metric.expect=76", f"{below}.constant=0.1"]).value
    assert value["metric"] == {"name": "accuracy", "expect": 76}
    observer = {"name": "moving-average", "constant": 0.1}
    assert value["passes"][0]["activations"]["observer"] == observer
    own = override(replace(document, value={"metric": "own:right"}), ["metric.expect=76"]).value
    assert own["metric"] == {"function": "own:right", "expect": 76}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("m.onnx", "{folder}/m.onnx"),
        ("../m.onnx", "{above}/m.onnx"),
        ("a/./b/../m.onnx", "{folder}/a/m.onnx"),
        ("/abs/m.onnx", "/abs/m.onnx"),
        ("$MODELS/m.onnx", "/models/m.onnx"),
        ("${MODELS}/m.onnx", "/models/m.onnx"),
        ("${MODELS}x/$NAME.onnx", "/modelsx/net.onnx"),
        ("~/m.onnx", "/home/somebody/m.onnx"),
        ("a$.onnx", "{folder}/a$.onnx"),
    ],
)
def test_paths(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, expected: str
):
    for variable, value in (("MODELS", "/models"), ("NAME", "net"), ("HOME", "/home/somebody")):
        monkeypatch.setenv(variable, value)
    text = SPEC.replace("tiny.onnx", f'"{written}"') + f'output: "{written}.d"\n'
    spec = load(text)
    wanted = expected.format(folder=tmp_path, above=tmp_path.parent)
    assert str(spec.onnx) == wanted
    assert str(spec.output) == wanted + ".d"


def test_paths_start_from_the_spec_and_not_from_the_shell(load: Load, tmp_path: Path):
    load(SPEC)
    below = tmp_path / "below"
    below.mkdir()
    Path("spec.yaml").rename(below / "spec.yaml")
    spec = load_spec(Path("below/spec.yaml"))
    assert spec.onnx == below / "tiny.onnx"
    assert spec.output == below / "out" / "tiny"
    assert spec.where("name") == "below/spec.yaml:2"


def test_a_variable_that_is_not_set(load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MODELS", raising=False)
    text = SPEC.replace("tiny.onnx", "$MODELS/m.onnx") + 'output: "${MODELS}/x"\n'
    assert refusal(load, text).splitlines() == [
        "spec.yaml:3: model.onnx: uses the environment variable MODELS, which is not set; "
        "export MODELS=/path, or write $$ for a dollar sign",
        "spec.yaml:6: output: uses the environment variable MODELS, which is not set; "
        "export MODELS=/path, or write $$ for a dollar sign",
    ]


def test_the_folder_around_a_link_is_that_of_its_target(load: Load, tmp_path: Path):
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "sub")
    for place in (tmp_path, tmp_path / "real"):
        (place / "tiny.onnx").touch()
    assert load(SPEC.replace("tiny.onnx", "link/../tiny.onnx")).onnx == tmp_path / "real/tiny.onnx"


def test_a_tilde_before_a_name(load: Load, tmp_path: Path):
    folder = tmp_path / "~nobody-is-called-so"
    assert load(SPEC.replace("tiny.onnx", f"{folder.name}/m.onnx")).onnx == folder / "m.onnx"
    written = seen_from(tmp_path, tmp_path / "~root" / "m.onnx")
    assert load(SPEC.replace("tiny.onnx", written)).onnx == tmp_path / "~root" / "m.onnx"


def test_inputs_keep_their_order_and_their_dynamic_axes(load: Load):
    inputs = "{b: {shape: [n, 3]}, a: {shape: [n, t], dtype: int64}}"
    spec = load(SPEC.replace("{onnx: tiny.onnx}", f"{{factory: a:b, inputs: {inputs}}}"))
    assert [str(i) for i in spec.inputs] == ["b float32[n, 3]", "a int64[n, t]"]


def test_anchors_that_become_too_much(load: Load):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9)]
    text = "\n".join([*levels, SPEC])
    assert refusal(load, text).startswith("spec.yaml:1: YAML: becomes too large or too deep")
