"""Configurations of smaller networks: found where there is one, refused where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compressor import catalog
from compressor.errors import SpecError
from compressor.exporters.safetensors.exporter import SafetensorsExporter
from compressor.files import read_json
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.saved_module import Alterations
from compressor.models.transformers import config as transformers_config
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.config import smaller_config
from compressor.progress import quiet_libraries
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.tiny_directories import save_tiny

transformers = pytest.importorskip("transformers")

IDS = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)
PIXELS = (TensorSpec("pixel_values", ("batch", 3, 32, 32), "float32"),)
WORDS = {"vocab_size": 40, "max_position_embeddings": 24, "num_hidden_layers": 2}
LLAMA = {
    **WORDS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
BERT = {**WORDS, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
GPT2 = {"vocab_size": 40, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2_ENDS = {"bos_token_id": None, "eos_token_id": None}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def network(name: str, sizes: dict[str, Any]) -> Any:
    """Build one with random weights; names are those of its classes, without Config and Model."""
    with quiet_libraries():
        config = getattr(transformers, f"{name}Config")(**sizes)
        config.use_cache = False
        config._attn_implementation = "eager"
        made = getattr(transformers, f"{name}EncoderModel" if name == "T5" else f"{name}Model")
        module = made(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.3, 0.4, generator=generator)
    return module


def smaller(name: str, sizes: dict[str, Any], after: dict[str, Any], folder: Path) -> Any:
    """Return a smaller network that knows the configuration as it was, which the folder holds."""
    whole, small = network(name, sizes), network(name, {**sizes, **after})
    whole.config.save_pretrained(folder)
    small.config = whole.config
    return small


def changed(folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if before.get(name) != value}


@pytest.mark.parametrize(
    ("name", "sizes", "after", "inputs"),
    [
        ("Llama", LLAMA, {"intermediate_size": 40}, IDS),
        (
            "Llama",
            LLAMA,
            {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
            IDS,
        ),
        # Queries are as wide as what becomes the width of the stream.
        ("Qwen3", {**LLAMA, "head_dim": 8}, {"hidden_size": 16}, IDS),
        ("Bert", BERT, {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 7}, IDS),
        ("GPT2", {**GPT2, **GPT2_ENDS}, {"n_inner": 50}, IDS),
        ("GPT2", {**GPT2, **GPT2_ENDS}, {"n_embd": 24, "n_head": 3, "n_inner": 128}, IDS),
        ("T5", T5, {"d_model": 24, "num_heads": 3, "d_ff": 20}, IDS),
        ("ResNet", RESNET, {"embedding_size": 10, "hidden_sizes": [10, 21]}, PIXELS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_sizes_are_found(
    name: str,
    sizes: dict[str, Any],
    after: dict[str, Any],
    inputs: tuple[TensorSpec, ...],
    tmp_path: Path,
) -> None:
    small = smaller(name, sizes, after, tmp_path)
    for known in (inputs, None):
        found = changed(tmp_path, smaller_config(small, tmp_path, known))
        assert found == {k: v for k, v in after.items() if k != "head_dim"}


def test_the_size_of_heads_is_stated_where_it_followed_from_others(tmp_path: Path) -> None:
    """Configurations of older versions leave it out; 20 // 2 is not 8."""
    after = {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    small = smaller("Llama", LLAMA, after, tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    del stored["head_dim"]
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert changed(tmp_path, smaller_config(small, tmp_path, IDS)) == after


def test_layers_that_differ_have_no_configuration(tmp_path: Path) -> None:
    small = smaller("Llama", LLAMA, {"intermediate_size": 40}, tmp_path)
    mlp = small.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = (nn.Linear(32, 44, bias=False) for _ in range(2))
    mlp.down_proj = nn.Linear(44, 32, bias=False)
    with pytest.raises(
        SpecError,
        match=r"config\.json of .* cannot state the sizes of the smaller network: "
        r"'layers\.1\.mlp\.down_proj\.weight' is \[32, 44\] and "
        r"'layers\.0\.mlp\.down_proj\.weight' \[32, 40\]; name layout: compressed-tensors in the "
        r"spec that prunes, with a target of ratio, .* or export layout: graph",
    ):
        smaller_config(small, tmp_path, IDS)


def test_heads_that_are_wider_than_their_share_have_none(tmp_path: Path) -> None:
    """BERT's heads are as wide as the stream divided by their number."""
    small = smaller("Bert", BERT, {}, tmp_path)
    for layer in small.encoder.layer:
        own = layer.attention.self
        own.query, own.key, own.value = (nn.Linear(32, 16) for _ in range(3))
        layer.attention.output.dense = nn.Linear(16, 32)
    with pytest.raises(
        SpecError,
        match=r"query\.bias' is \[16\]|dense\.weight' is \[32, 16\].* keep by rules what it does "
        r"not name \(layers: \[\{match: 'encoder\.layer\.\*\.attention\.self"
        r"\.\*', skip: true\}\]\), or export layout: graph",
    ):
        smaller_config(small, tmp_path, None)


def test_the_same_shapes_with_other_heads_are_another_network(tmp_path: Path) -> None:
    """Four heads of four, and two of eight."""
    after = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    small = smaller("Llama", LLAMA, after, tmp_path)
    shapes_only = changed(tmp_path, smaller_config(small, tmp_path, None))
    assert shapes_only == {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert changed(tmp_path, smaller_config(small, tmp_path, IDS)) == {"head_dim": 4}


def test_what_computes_something_else_is_not_described(tmp_path: Path) -> None:
    """Nothing in its shapes says that the network has two heads."""
    small = smaller("GPT2", {**GPT2, **GPT2_ENDS}, {"n_head": 2}, tmp_path)
    with pytest.raises(SpecError, match="a network of the same shapes computes something else"):
        smaller_config(small, tmp_path, IDS)


def test_numbers_that_a_class_derives_from_sizes_are_named(tmp_path: Path) -> None:
    """Gemma multiplies its table of tokens by the root of the stream's width."""
    small = smaller("Gemma", LLAMA | {"head_dim": 8}, {"hidden_size": 8}, tmp_path)
    table = small.embed_tokens
    table.scalar_embed_scale = 32**0.5
    table.embed_scale.fill_(32**0.5)
    with pytest.raises(
        SpecError,
        match=r"computes something else \(scalar_embed_scale of 'embed_tokens' is 5\.657, and "
        r"2\.828 by these sizes\); .*\(layers: \[\{match: 'embed_tokens\.\*', skip: true\}\]\)",
    ):
        smaller_config(small, tmp_path, IDS)


def test_a_graph_says_why_it_is_no_directory(tmp_path: Path) -> None:
    small = smaller("GPT2", {**GPT2, **GPT2_ENDS}, {"n_head": 2}, tmp_path)
    altered = Alterations(attributes={})
    carrier = TorchCarrier(small, IDS, folder=tmp_path, altered=altered)
    (said,) = SafetensorsExporter().remarks(carrier)
    assert said.startswith(
        "compressor.load opens this model, and transformers could not: config.json cannot state "
        "the sizes of the smaller network: a network of the same shapes computes something else "
        "(scaling of 'h.0.attn' is 0.25, and 0.3536 by these sizes); for a directory, name layout"
    )
    assert "{match: 'h.*.attn.*', skip: true}" in said
    assert "\n" not in said
    assert "layout: graph" not in said
    fitting = smaller("GPT2", {**GPT2, **GPT2_ENDS}, {"n_inner": 50}, tmp_path)
    carrier = TorchCarrier(fitting, IDS, folder=tmp_path, altered=altered)
    assert SafetensorsExporter().remarks(carrier) == ()


@pytest.mark.slow
def test_rules_that_a_message_names_make_a_directory(tmp_path: Path) -> None:
    """The stream of DINOv2 reaches an output and stays, so that its heads have to, too."""
    save_tiny(tmp_path, "dinov2")

    def pruned(rules: list[dict[str, Any]]) -> TorchCarrier:
        carrier = open_pretrained("AutoModel", tmp_path, {}, PIXELS)
        options = {"target": {"ratio": 0.5}, "layers": tuple(rules)}
        step = catalog.load("pass", "prune-structured").model_validate(options)
        smaller = step.apply(carrier, PassContext(targets=frozenset({"ort-cpu"})), {}).carrier
        assert isinstance(smaller, TorchCarrier)
        return smaller

    with pytest.raises(SpecError, match=r"layers: \[") as raised:
        _ = pruned([]).config
    named = re.findall(r"match: '([^']+)'", str(raised.value))
    found = pruned([{"match": match, "skip": True} for match in named]).config
    assert found["mlp_ratio"] < read_json(tmp_path / "config.json", "", "")["mlp_ratio"]


def test_sizes_that_build_and_do_not_run_are_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = smaller("Llama", LLAMA, {"intermediate_size": 40}, tmp_path)

    def mismatched(*_: object) -> nn.Module:
        return nn.Linear(3, 3)

    monkeypatch.setattr(transformers_config, "described_network", mismatched)
    with pytest.raises(SpecError, match="a network of the same shapes computes something else"):
        smaller_config(small, tmp_path, IDS)


def test_not_everything_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = smaller("Llama", LLAMA, {"hidden_size": 20, "head_dim": 8}, tmp_path)
    for index, layer in enumerate(small.layers):
        layer.mlp.up_proj = nn.Linear(20, 30 + index, bias=False)
    built = 0
    real = transformers_config.described_shapes

    def counted(*args: Any) -> Any:
        nonlocal built
        built += 1
        return real(*args)

    monkeypatch.setattr(transformers_config, "described_shapes", counted)
    with pytest.raises(SpecError, match="cannot state"):
        smaller_config(small, tmp_path, IDS)
    assert built <= transformers_config._MOST_BUILT + 1


def test_a_carrier_knows_its_configuration(tmp_path: Path) -> None:
    small = smaller("Bert", BERT, {"intermediate_size": 40}, tmp_path)
    before = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert TorchCarrier(small, IDS).config == {}
    assert TorchCarrier(small, IDS, folder=tmp_path).config == before
    altered = Alterations(attributes={})
    carrier = TorchCarrier(small, IDS, folder=tmp_path, altered=altered)
    assert carrier.config == {**before, "intermediate_size": 40}
    executed = Alterations(executes_graph=True)
    with pytest.raises(SpecError, match="no longer a network of its class, but executes a graph"):
        _ = TorchCarrier(small, IDS, folder=tmp_path, altered=executed).config
