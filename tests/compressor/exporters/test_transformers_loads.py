"""What ``transformers`` makes of the directories that are written for it, left as it is."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.errors import ArtifactError, ModelError
from compressor.exporters.safetensors.transformers_runner import INSTALL, TransformersRunner
from compressor.types.layers import Scheme, StoredTensor
from tests.compressor.exporters.hugging_face import (
    dequantized,
    kept,
    presets,
    quantized,
    tensors_of,
    tiny,
    write,
)

for _package in ("transformers", "compressed_tensors"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12))


def schemes(choice: str, dtype: torch.dtype) -> Callable[[str], Scheme | None]:
    scheme = presets(dtype)[choice]
    return lambda name: None if "lm_head" in name else scheme


def error(found: Any, want: Any) -> float:
    found, want = found.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.float().numpy()


def check(directory: Path, model: Any, tensors: dict[str, StoredTensor], tolerance: float) -> None:
    """Compare weights and logits of the directory with those that the codes stand for."""
    before = logits(model)
    write(directory, model, tensors)
    weights = dequantized(model, tensors)
    runner = TransformersRunner(directory)
    found = runner.run({"input_ids": TOKENS, "unknown": TOKENS, "labels": TOKENS})
    assert list(found) == ["output"]
    loaded = dict(runner._model.named_parameters())
    for name, weight in weights.items():
        dtype = tensors[name].dtype
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], weight.to(dtype)), name
    want = logits(model)
    assert error(found["output"], want) <= tolerance
    # The tolerance tells quantized logits from the float model's.
    assert error(before, want) > 2 * tolerance
    again = runner.run({"input_ids": TOKENS})
    assert np.array_equal(again["output"], found["output"])


@pytest.mark.parametrize("preset", presets(F32))
def test_every_scheme(preset: str, tmp_path: Path) -> None:
    model = tiny("Llama", F32)
    check(tmp_path, model, tensors_of(model, schemes(preset, F32)), 1e-5)


@pytest.mark.parametrize("preset", ["int8", "int4-g32-asym", "int3-g32", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_weights_of_16_bits(dtype: torch.dtype, preset: str, tmp_path: Path) -> None:
    model = tiny("Llama", dtype)
    check(tmp_path, model, tensors_of(model, schemes(preset, dtype)), 1e-3)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "OPT"])
def test_architectures(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = tiny(architecture, F32, tied)
    check(tmp_path, model, tensors_of(model, schemes("int4-g32", F32)), 1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tables_and_output_layers(tied: bool, tmp_path: Path) -> None:
    model, scheme = tiny("OPT", F32, tied), presets(F32)["int4-g32"]
    check(tmp_path, model, tensors_of(model, lambda _: scheme, tables=True), 1e-5)


def test_a_quantized_output_layer(tmp_path: Path) -> None:
    model, scheme = tiny("Llama", F32), presets(F32)["int8"]
    check(tmp_path, model, tensors_of(model, lambda _: scheme), 1e-5)


def test_several_schemes_and_kept_layers(tmp_path: Path) -> None:
    model, known = tiny("Llama", F32), presets(F32)
    rules = {
        "layers.0": "int8",
        "down_proj": "fp8",
        "o_proj": "int3-g32",
        "gate_proj": "int2-g32",
        "v_proj": None,
        "lm_head": None,
    }

    def choose(name: str) -> Scheme | None:
        preset = next((rules[part] for part in rules if part in name), "int4-g128")
        return None if preset is None else known[preset]

    tensors = tensors_of(model, choose)
    check(tmp_path, model, tensors, 1e-5)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert len(config["config_groups"]) == 5


def test_several_kinds_of_4_bit_floats(tmp_path: Path) -> None:
    model, known = tiny("Qwen2", BF16), presets(BF16)

    def choose(name: str) -> Scheme | None:
        if "lm_head" in name:
            return None
        return known["nvfp4" if "layers.0" in name else "mxfp4" if "mlp" in name else "int4-g32"]

    tensors = tensors_of(model, choose)
    check(tmp_path, model, tensors, 1e-3)


def test_the_auto_class_loads_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers

    model = tiny("Llama", F32)
    tensors = tensors_of(model, schemes("int4-g32", F32))
    write(tmp_path, model, tensors)
    want = TransformersRunner(tmp_path).run({"input_ids": TOKENS})["output"]
    assert capfd.readouterr() == ("", "")  # no progress bars, no logs
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert np.array_equal(logits(loaded), want)


def test_several_outputs(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = transformers.BertModel(config)
    model.eval()
    model.config.dtype = F32
    write(tmp_path, model, tensors_of(model, lambda _: presets(F32)["int4-g32"]))
    found = TransformersRunner(tmp_path).run({"input_ids": TOKENS})
    assert {name: array.shape for name, array in found.items()} == {
        "output_0": (2, 12, 32),
        "output_1": (2, 32),
    }


@pytest.fixture
def written(tmp_path: Path) -> Path:
    model = tiny("Llama", F32)
    return write(tmp_path / "out", model, tensors_of(model, schemes("int4-g32", F32)))


def test_an_input_that_is_missing(written: Path) -> None:
    runner = TransformersRunner(written)
    with pytest.raises(ModelError, match="does not run"):
        runner.run({"attention_mask": np.ones((2, 12), np.int64)})
    with pytest.raises(ModelError, match="does not run"):
        runner.run({"input_ids": TOKENS + 96})


def test_layers_that_it_has_no_values_for(tmp_path: Path) -> None:
    # GPT-2 keeps its layers in a class that compressed-tensors does not know.
    model, scheme = tiny("GPT2", F32), presets(F32)["int4-g32"]
    tensors = {
        name: quantized(name, value, scheme)
        if "c_" in name and value.ndim == 2
        else kept(name, value)
        for name, value in model.state_dict().items()
    }
    write(tmp_path / "out", model, tensors)
    with pytest.raises(ArtifactError, match=r"no values for 8 of its tensors: 'transformer.h.0"):
        TransformersRunner(tmp_path / "out")


def test_a_shape_that_does_not_fit(written: Path) -> None:
    weights = load_file(written / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    weights[name] = weights[name][:5].clone()
    save_file(weights, written / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="does not load it"):
        TransformersRunner(written)


@pytest.mark.parametrize("damage", ["cut", "gone", "scheme", "sizes"])
def test_damaged_directories(written: Path, damage: str) -> None:
    weights, config = written / "model.safetensors", written / "config.json"
    content = json.loads(config.read_text())
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "gone":
        weights.unlink()
    elif damage == "scheme":
        content["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "complex"
    else:
        content["num_attention_heads"] = 5
    config.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"artifact 'out': transformers .* does not load it"):
        TransformersRunner(written)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (None, "names no architecture"),
        ([], "names no architecture"),
        (["OwnModel"], "is a 'OwnModel', which transformers"),
        (["AutoConfig"], "is a 'AutoConfig', which transformers"),
        (["logging"], "is a 'logging', which transformers"),
    ],
)
def test_classes_that_are_not_to_be_had(written: Path, names: Any, why: str) -> None:
    config = written / "config.json"
    content = {**json.loads(config.read_text()), "architectures": names}
    content["auto_map"] = {"AutoModelForCausalLM": "modeling.OwnModel"}
    (written / "modeling.py").write_text("raise SystemExit('code of the model was run')")
    config.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=why):
        TransformersRunner(written)


@pytest.mark.parametrize("package", ["transformers", "compressed_tensors"])
def test_packages_that_are_not_installed(
    package: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return genuine(name, *args)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        if package == "compressed_tensors":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ArtifactError) as caught:
        TransformersRunner(written)
    assert caught.value.remedy == INSTALL
    assert package.replace("_", "-") in caught.value.problem
