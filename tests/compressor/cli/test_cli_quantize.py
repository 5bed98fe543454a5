"""``compress quantize``: from one directory to another, streamed, checked and resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from compressor.cli.application import application
from compressor.errors import ArtifactError, ExitCode, SpecError
from compressor.files import json_sha256
from compressor.lab.quantizing import QuantizeOptions, in_terms_of_options
from compressor.passes.quantize.weights.layers import PRESETS
from tests.paths import ROOT

HIDDEN, WIDE, LAYERS, WORDS = 128, 256, 3, 50
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_the_command_offers_the_presets_of_the_pass() -> None:
    command = application.get_command(click.Context(application), "quantize")
    assert command is not None
    (option,) = (p for p in command.params if p.name == "preset")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == tuple(PRESETS)


def llama(folder: Path, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """Write a sharded Hugging Face directory: a shard for each layer, and one for the rest."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    wide, heads = 2 * hidden, hidden // 2
    shapes = {"q": (hidden, hidden), "k": (heads, hidden), "v": (heads, hidden)}
    shapes = {f"self_attn.{n}_proj": s for n, s in (shapes | {"o": (hidden, hidden)}).items()}
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
    shapes |= {"mlp.down_proj": (hidden, wide)}
    norms = ("input_layernorm", "post_attention_layernorm")
    index: dict[str, str] = {}
    for layer in range(layers + 1):
        tensors: dict[str, torch.Tensor] = {}
        if layer < layers:
            start = f"model.layers.{layer}."
            for name, shape in shapes.items():
                tensors[f"{start}{name}.weight"] = torch.randn(shape).bfloat16()
            tensors |= {f"{start}{norm}.weight": torch.ones(hidden).bfloat16() for norm in norms}
        else:
            for name in ("model.embed_tokens", "lm_head"):
                tensors[f"{name}.weight"] = torch.randn(WORDS, hidden).bfloat16()
            tensors["model.norm.weight"] = torch.ones(hidden).bfloat16()
        file = f"model-{layer + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers}
    write(folder / "config.json", CONFIG | sizes)
    write(folder / "tokenizer.json", {"version": "1.0"})
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def compress(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application, ["quantize", *map(str, arguments)])


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "llama")


def test_a_directory_becomes_another(source: Path, tmp_path: Path):
    before = tree(source)
    output = tmp_path / "small"
    done = compress(source, "-o", output, "--preset", "int4-g32", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["baseline"]["metric"] is None
    assert "cannot be run" in report["baseline"]["metric_reason"]
    artifact = report["artifacts"][0]
    assert artifact["bytes"] == artifact["predicted_bytes"]
    # Directory against directory: both hold configuration, index and tokenizer.
    assert artifact["float_bytes"] == sum(map(len, before.values()))
    assert artifact["latency"] == []
    rows = {row["name"]: row for row in report["passes"][0]["layers"]}
    assert rows["model.layers.0.mlp.up_proj"]["scheme"] == "int4/group 32"
    assert 15 < rows["model.layers.0.mlp.up_proj"]["weight_sqnr_db"] < 25
    assert rows["lm_head"]["scheme"] == "bfloat16"
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (output / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    manifest = json.loads((output / "manifest.json").read_text())
    named = {entry["name"]: entry for entry in manifest["inputs"]}
    shard = named["model-00001-of-00004.safetensors"]
    assert shard["sha256"] is None
    assert shard["bytes"] == len(before["model-00001-of-00004.safetensors"])
    assert {"config.json", "model.safetensors.index.json"} <= {
        entry["name"] for entry in manifest["outputs"]
    }
    assert tree(source) == before


def test_what_follows_the_network_comes_along(source: Path, tmp_path: Path):
    """As it is now: the store kept files beside the weights from before they were changed."""
    pooling = Path("1_Pooling", "config.json")
    (source / "1_Pooling").mkdir()
    write(source / "modules.json", [{"path": ""}, {"path": "1_Pooling"}])
    for mode in ("mean", "lasttoken"):
        write(source / pooling, {"pooling_mode": mode})
        write(source / "tokenizer_config.json", {"chat_template": mode})
        done = compress(source, "-o", tmp_path / "small", "--preset", "int4-g32", "--json")
        assert done.exit_code == 0, done.output
        artifact = json.loads(done.stdout)["artifacts"][0]
        assert artifact["bytes"] == artifact["predicted_bytes"]
        assert str(pooling) in [file["name"] for file in artifact["files"]]
        for file in (pooling, Path("tokenizer_config.json")):
            assert (tmp_path / "small" / file).read_bytes() == (source / file).read_bytes()


def test_the_directory_is_ready_to_upload(source: Path, tmp_path: Path):
    """No store lies in it, which would double it, and a card says what it is."""
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Llama\n\nTrained on *tales*.\n")
    output = tmp_path / "klein & fein"
    assert compress(source, "-o", output, "--preset", "int4-g32").exit_code == 0
    manifest = json.loads((output / "manifest.json").read_text())
    listed = {entry["name"] for entry in manifest["outputs"]}
    assert {path.name for path in output.rglob("*")} == {"manifest.json", *listed}
    assert sorted(p.name for p in (tmp_path / ".compressor").iterdir()) == ["klein & fein"]
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# klein-fein\n\nThe weights of `llama`, ")
    assert '- {"pass": "quantize-weights", "preset": "int4-g32", "method": "rtn"' in card
    assert 'AutoModelForCausalLM.from_pretrained("klein & fein")' in card
    assert "# The float model\n\n# Llama\n\nTrained on *tales*.\n" in card
    shards = [e for e in manifest["outputs"] if e["name"].endswith(".safetensors")]
    assert all(f"`{shard['name']}`: {shard['sha256']}\n" in card for shard in shards)
    reports = {"report.json", "report.md", "report.html", "README.md"}
    outputs = [entry for entry in manifest["outputs"] if entry["name"] not in reports]
    rest = {k: v for k, v in manifest.items() if k not in ("seal", "fingerprint")}
    assert json_sha256({**rest, "outputs": outputs}) == manifest["fingerprint"]
    assert f"Fingerprint of `manifest.json`: {manifest['fingerprint']}." in card
    proof = CliRunner().invoke(application, ["verify", str(output)])
    assert proof.exit_code == 0, proof.output
    again = compress(source, "-o", output, "--preset", "int4-g32")
    assert "Nothing has changed" in again.stderr
    assert (output / "README.md").read_text() == card


def test_a_directory_of_somebody_else_with_a_manifest(source: Path, tmp_path: Path):
    output = tmp_path / "app"
    output.mkdir()
    (output / "manifest.json").write_text('{"name": "app", "icons": []}')
    done = compress(source, "-o", output)
    assert done.exit_code == 2
    assert "holds files that no run of compressor made" in done.stderr


def test_calibrated_and_judged_on_text(tmp_path: Path):
    """From a directory with its tokenizer to codes, a verdict and a card with numbers."""
    sample, output = ROOT / "samples" / "tiny-llama", tmp_path / "small"
    for name in ("calibration", "evaluation"):
        text = (sample / f"{name}.txt").read_text(encoding="utf-8")[:6000]
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    train, held_out = tmp_path / "calibration.txt", tmp_path / "evaluation.txt"
    how = ("--preset", "int4-g32", "--method", "gptq", "--samples", "8", "--length", "128")
    done = compress(
        sample / "checkpoint", "-o", output, *how, "--text", train, "--eval", held_out, "--json"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    (artifact,) = report["artifacts"]
    assert report["baseline"]["metric"]["name"] == "perplexity"
    assert report["verdict"] in ("passed", "unknown"), "it is measured"
    assert artifact["metric_reason"] is None
    assert 0 < artifact["kl"] < 0.05
    assert 0 < artifact["metric"]["value"] < 10


def test_transformers_opens_it(source: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    output = tmp_path / "small"
    assert compress(source, "-o", output, "--preset", "int8").exit_code == 0
    tokens = torch.arange(12).reshape(2, 6)
    logits = []
    for folder in (source, output):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(model.eval()(tokens).logits)
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 1e-4 < error < 0.1


def test_the_second_call_does_nothing(source: Path, tmp_path: Path):
    output = tmp_path / "small"
    assert compress(source, "-o", output).exit_code == 0
    first = tree(output)
    stamps = {p.name: p.stat().st_mtime_ns for p in output.glob("model*")}
    again = compress(source, "-o", output)
    assert again.exit_code == 0
    assert "Nothing has changed" in again.stderr
    assert tree(output).keys() == first.keys()
    assert {p.name: p.stat().st_mtime_ns for p in output.glob("model*")} == stamps


def test_a_table_for_people(source: Path, tmp_path: Path):
    done = compress(source, "-o", tmp_path / "small", "--skip", "model.layers.0.*")
    assert done.exit_code == 0
    assert done.stdout == ""
    assert "model.safetensors.index.json" in done.stderr
    report = json.loads((tmp_path / "small" / "report.json").read_text())
    schemes = {row["name"]: row["scheme"] for row in report["passes"][0]["layers"]}
    assert schemes["model.layers.0.mlp.up_proj"] == "bfloat16"
    assert schemes["model.layers.1.mlp.up_proj"] == "int4/group 128"


def test_one_file(source: Path, tmp_path: Path):
    file = source / "model-00001-of-00004.safetensors"
    done = compress(file, "-o", tmp_path / "small")
    assert done.exit_code == 0, done.output
    with safe_open(tmp_path / "small" / "model.safetensors", "pt") as opened:
        assert "model.layers.0.mlp.up_proj.weight_packed" in opened.keys()  # noqa: SIM118


@pytest.mark.slow
def test_killed_and_called_again(tmp_path: Path):
    """A process that dies half-way leaves whole shards; the next one ends in the same bytes."""
    source = llama(tmp_path / "llama", layers=10, hidden=1024)
    assert compress(source, "-o", tmp_path / "whole", "--no-check").exit_code == 0
    command = [sys.executable, "-m", "compressor", "quantize", str(source), "--quiet", "-o"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "broken"], cwd=tmp_path, env=environment)
    journal = "*.done.json"
    deadline = time.monotonic() + 120
    while (
        not list((tmp_path / ".compressor" / "broken").rglob(journal))
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)
        if process.poll() is not None:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    kept = {
        p.name: p.stat().st_mtime_ns for p in (tmp_path / ".compressor" / "broken").rglob(journal)
    }
    assert kept
    assert not list((tmp_path / "broken").glob("model*"))  # nothing half is where people look
    assert compress(source, "-o", tmp_path / "broken", "--no-check").exit_code == 0
    names = [p.name for p in (tmp_path / "whole").glob("*.safetensors")]
    assert len(names) == 11
    for name in [*names, "config.json", "model.safetensors.index.json"]:
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_of_somebody_else_s_by_force(source: Path, tmp_path: Path):
    target = tmp_path / "full"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    (target / "config.json").write_text("{}")
    assert compress(str(source), "-o", str(target)).exit_code == 2
    done = compress(str(source), "-o", str(target), "--force")
    assert done.exit_code == 0, done.output
    assert (target / "thesis.txt").read_text() == "mine"
    assert "quantization_config" in json.loads((target / "config.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gone", "-o", "out"], 2, "does not exist"),
        (["llama", "-o", "llama"], 2, "is the folder of the checkpoint"),
        (["llama", "-o", "foreign"], 2, "holds files that no run of compressor made"),
        (["llama", "-o", "out", "--skip", "model.layer.*"], 2, "model.layer.*"),
        (["llama", "-o", "out", "--skip", "*"], 2, "touches no layer"),
        (["llama", "-o", "out", "--preset", "int5"], 2, "int5"),
        (["llama", "-o", "out", "--method", "gptq"], 2, "option --text: is missing, and method"),
        (["llama", "-o", "out", "--method", "reconstruct"], 2, "option --text: is missing, and"),
        (["llama", "-o", "out", "--preset", "nvfp4-w4a4"], 2, "preset 'nvfp4-w4a4' is calibrated"),
        (["llama", "-o", "out", "--preset", "fp8", "--for", "vllm-cpu"], 2, "has a kernel for fp8"),
        (["llama", "-o", "out", "--format", "gptq", "--embeddings"], 2, "leave out --embeddings"),
        (
            ["llama", "-o", "out", "--format", "gguf", "--for", "vllm"],
            2,
            "which does not read gguf; use --format compressed-tensors",
        ),
        (
            ["llama", "-o", "out", "--preset", "int8-w8a8", "--for", "llama.cpp"],
            2,
            "have no place in gguf, which holds weights alone",
        ),
        (
            ["llama", "-o", "out", "--format", "gguf", "--for", "genai"],
            2,
            "which does not read gguf; use --format genai",
        ),
        (
            ["llama", "-o", "out", "--preset", "int8-w8a8", "--for", "genai"],
            2,
            "have no place in genai, which holds weights alone",
        ),
        (
            ["llama", "-o", "out", "--preset", "fp8", "--for", "genai"],
            2,
            "and ONNX Runtime multiplies with integers of 2, 3, 4 and 8 bits",
        ),
        (["llama", "-o", "out", "--text", "gone.txt"], 2, "given, and method 'rtn' with preset"),
        (
            ["llama", "-o", "out", "--method", "gptq", "--text", "gone.txt"],
            2,
            "gone.txt' does not exist",
        ),
        (["llama"], 2, "--output"),
        (["cut", "-o", "out"], 3, "model-00001-of-00004.safetensors"),
        (["missing", "-o", "out"], 3, "model-00002-of-00004.safetensors"),
        (["odd", "-o", "out"], 3, "config.json"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
):
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "llama")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    cut = llama(tmp_path / "cut") / "model-00001-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    (llama(tmp_path / "missing") / "model-00002-of-00004.safetensors").unlink()
    write(llama(tmp_path / "odd") / "config.json", CONFIG | {"hidden_size": 100})
    done = compress(*arguments)
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()
    assert [p.name for p in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]


def test_remedies_are_options_of_the_command(tmp_path: Path):
    """It advised other rules, and to leave out an export: its user has neither."""
    narrow = llama(tmp_path / "narrow", layers=1, hidden=96)
    refused = compress(narrow, "-o", tmp_path / "int4", "--preset", "int4-g128")
    assert refused.exit_code == ExitCode.BAD_SPEC
    assert "touches no layer: " in refused.stderr
    assert refused.stderr.endswith("; use --preset int4-g32 or int8, or --embeddings\n")
    double = llama(tmp_path / "double", layers=1)
    for path in double.glob("*.safetensors"):
        save_file({n: t.double() for n, t in load_file(path).items()}, path)
    refused = compress(double, "-o", tmp_path / "int8")
    assert ": its weight is float64, wider than float32; " in refused.stderr
    assert refused.stderr.endswith(
        "; save the model in float32, as by model.float(), and give that\n"
    )
    for raised in (SpecError, ArtifactError):
        words = r"a: b; use another --format, or skip it by --skip$"
        with pytest.raises(raised, match=words), in_terms_of_options(QuantizeOptions()):
            raise raised("a", "b", "leave out this export, or skip it by a rule")


def test_an_adapter_beside_the_weights_is_named_and_left_behind(tmp_path: Path):
    source, out = llama(tmp_path / "in", layers=1), tmp_path / "out"
    write(source / "adapter_config.json", {"base_model_name_or_path": "own/base"})
    done = compress(source, "-o", out)
    assert done.exit_code == 0, done.stderr
    assert "Note: adapter_config.json: an adapter lies beside the model's weights" in done.output
    assert not (out / "adapter_config.json").exists()
