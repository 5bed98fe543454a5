"""Bare checkpoints as models: the same layers as the graph of the model gives."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.checkpoint.folder import layer_of
from compressor.models.checkpoint.reading import FileTensor
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import TensorSpec
from tests.compressor.models.checkpoint.llama_files import llama_tensors, write_folder

INT8 = Scheme(8)


def rounded(matrix: torch.Tensor) -> QuantizedTensor:
    scale = matrix.float().abs().amax(1, keepdim=True) / 127
    codes = torch.round(matrix.float() / scale).to(torch.int8)
    return QuantizedTensor(codes, scale, torch.zeros_like(scale, dtype=torch.int8), INT8)


def unread(matrix: torch.Tensor) -> QuantizedTensor:
    raise AssertionError(f"{tuple(matrix.shape)} were computed")


class Network(torch.nn.Module):
    """Linear layers with and without bias, a table, a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(10, 8)
        self.up = torch.nn.Linear(8, 12, bias=False)
        self.norm = torch.nn.LayerNorm(12)
        self.down = torch.nn.Linear(12, 4)
        self.conv = torch.nn.Conv1d(4, 6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.down(self.norm(self.up(self.embed_tokens(tokens))))
        return self.conv(x.transpose(1, 2))


def test_layers_are_those_of_the_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network().eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    bare: Carrier = open_checkpoint(tmp_path)
    lowered = TorchCarrier(network, [TensorSpec("tokens", ("batch", 5), "int64")])
    expected = {layer.name: layer for layer in lowered.layers()}
    assert {layer.name for layer in bare.layers()} == expected.keys()
    for layer in bare.layers():
        other = expected[layer.name]
        same = ("name", "kind", "weight", "shape", "dtype", "transposed", "rows", "columns")
        assert {k: getattr(layer, k) for k in same} == {k: getattr(other, k) for k in same}
        matrix = layer.canonical(bare.weight(layer))
        assert torch.equal(matrix, other.canonical(lowered.weight(other)))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.embed_tokens.weight", (9, 4), "Gather"),
        ("transformer.wte.weight", (9, 4), "Gather"),
        ("transformer.wpe.weight", (9, 4), "Gather"),
        ("bert.embeddings.word_embeddings.weight", (9, 4), "Gather"),
        ("shared.weight", (9, 4), "Gather"),
        ("gpt_neox.embed_in.weight", (9, 4), "Gather"),
        ("model.tok_embeddings.weight", (9, 4), "Gather"),
        ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (9, 4), "Gather"),
        ("gpt_neox.embed_out.weight", (9, 4), "MatMul"),
        ("albert.encoder.embedding_hidden_mapping_in.weight", (9, 4), "MatMul"),
        ("electra.embeddings_project.weight", (9, 4), "MatMul"),
        ("lm_head.weight", (9, 4), "MatMul"),
        ("x.attn.c_attn.weight", (9, 4), "MatMul"),
        ("patch_embed.proj.weight", (9, 3, 2, 2), "Conv"),
        ("conv.weight", (9, 3, 2), "Conv"),
        ("conv.weight", (9, 3, 2, 2, 2), "Conv"),
        ("conv.weight", (9, 3, 2, 2, 2, 2), None),
        ("model.norm.weight", (9,), None),
        ("odd.layer_norm.weight", (9, 4), None),
        ("h.0.ln_1.weight", (9, 4), None),
        ("input_layernorm.weight", (9, 4), None),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 9, 4), None),
        ("fc.bias", (9, 4), None),
        ("none.weight", (0, 4), None),
        ("weight", (9, 4), None),
    ],
)
def test_names_tell_what_a_tensor_is(name: str, shape: tuple[int, ...], kind: str | None) -> None:
    layer = layer_of(name, shape, "float32", {})
    assert (layer.kind if layer is not None else None) == kind


@pytest.mark.parametrize(
    ("model_type", "module", "transposed"),
    [
        ("gpt2", "h.0.attn.c_attn", True),
        ("gpt2", "h.0.mlp.c_fc", True),
        ("gpt2", "lm_head", False),
        ("gpt_bigcode", "h.0.attn.c_attn", False),
        ("llama", "c_proj", False),
        (None, "c_proj", False),
    ],
)
def test_weights_of_conv1d_are_transposed(
    model_type: str | None, module: str, transposed: bool
) -> None:
    layer = layer_of(f"{module}.weight", (8, 24), "float32", {"model_type": model_type})
    assert layer is not None
    assert layer.transposed is transposed
    assert (layer.rows, layer.columns) == ((24, 8) if transposed else (8, 24))


def test_it_offers_weights_only(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    assert carrier.kind == "checkpoint"
    assert carrier.offers == {Capability.WEIGHTS}
    assert carrier.inputs == carrier.outputs == ()
    for ask in (carrier.graph, carrier.runner, partial(carrier.with_graph, None)):
        with pytest.raises(SpecError, match=r"set model\.factory \(for example transformers\.A"):
            ask()  # type: ignore[operator]  # each takes nothing more


def test_nothing_is_read_before_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("data were read")

    for name in ("__call__", "rows"):
        monkeypatch.setattr(FileTensor, name, refuse)
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    layer = carrier.layers()[0]
    codes = WeightCodes(layer, INT8, unread)
    changed = carrier.with_codes({layer.weight: codes})
    assert changed.tensors()[layer.weight].codes is codes
    assert changed.with_weights({"model.norm.weight": torch.ones(64)}).tensors()
    assert carrier.digest()


def test_codes(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    layer = next(x for x in carrier.layers() if x.name.endswith("down_proj"))
    changed = carrier.with_codes({layer.weight: WeightCodes(layer, INT8, rounded)})
    assert carrier.tensors()[layer.weight].codes is None
    (now,) = [x for x in changed.layers() if x.name == layer.name]
    assert (layer.dtype, now.dtype) == ("bfloat16", "int8")
    expected = rounded(llama_tensors()[layer.weight]).codes
    assert torch.equal(changed.weight(now), expected)
    assert changed.tensors()[layer.weight].nbytes == INT8.nbytes(64, 96)
    with pytest.raises(KeyError, match=r"no layer has a weight 'model\.norm\.weight'"):
        carrier.with_codes({"model.norm.weight": WeightCodes(layer, INT8, rounded)})


def test_other_weights(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    name = "model.layers.0.mlp.up_proj.weight"
    changed = carrier.with_weights({name: torch.ones(96, 64), "model.norm.weight": torch.ones(64)})
    (layer,) = [x for x in changed.layers() if x.weight == name]
    assert layer.dtype == "float32"
    assert torch.equal(changed.weight(layer), torch.ones(96, 64))
    assert torch.equal(carrier.weight(layer), llama_tensors()[name])
    assert list(changed.tensors()) == list(carrier.tensors())
    with pytest.raises(KeyError, match="no tensor 'gone'"):
        carrier.with_weights({"gone": torch.ones(1)})


def test_state_is_a_recipe(tmp_path: Path) -> None:
    carrier = open_checkpoint(write_folder(tmp_path / "m"))
    (tmp_path / "state").mkdir()
    carrier.save(tmp_path / "state")
    assert not list((tmp_path / "state").iterdir())
    assert carrier.restore(tmp_path / "state") is carrier


def test_the_digest_is_cheap_and_notices_changes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    before = open_checkpoint(folder).digest()
    assert open_checkpoint(folder).digest() == before
    shard = sorted(folder.glob("*.safetensors"))[0]
    stat = shard.stat()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    touched = open_checkpoint(folder).digest()
    assert touched != before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert open_checkpoint(folder).digest() not in (before, touched)


def test_a_tied_output_layer_is_not_stored(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_folder(tmp_path / "m", tensors)
    assert "lm_head.weight" in open_checkpoint(folder).tensors()
    del tensors["lm_head.weight"]
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    tied: CheckpointCarrier = open_checkpoint(
        write_folder(tmp_path / "tied", tensors, config=config)
    )
    assert "lm_head.weight" not in tied.tensors()
