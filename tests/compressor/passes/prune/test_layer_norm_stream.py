"""``criterion: principal-components`` where layer norms, which take off a mean, read the stream."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.errors import SpecError
from compressor.exporters import SafetensorsExporter
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.carrier import open_pretrained
from compressor.passes.prune.structured.principal import to_components
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from tests.compressor.passes.prune.structured_models import carrier as module_of
from tests.compressor.passes.prune.structured_models import data, declared, pruned
from tests.compressor.passes.quantize.static_models import Given

WIDTH, RANK = 16, 11
KEPT = [{"match": "*inner", "skip": True}]
LAYOUT = SafetensorsExporter(layout="compressed-tensors")


class Block(nn.Module):
    """A branch behind a norm."""

    def __init__(self, shift: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=shift)
        self.inner = nn.Linear(WIDTH, 24)
        self.outer = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class PreNorm(nn.Module):
    """Rows of an image as tokens, places, blocks, and a head without a bias behind a norm."""

    def __init__(self, shift: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(30, WIDTH)
        self.places = nn.Parameter(torch.zeros(1, 10, WIDTH))
        self.blocks = nn.Sequential(Block(), Block(shift))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return self.embed(image.transpose(1, 2).flatten(2)) + self.places

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(image))).mean(1))


def outputs(carrier: Carrier, given: Any = None) -> np.ndarray[Any, Any]:
    (batch,) = (given or data(1, 9)).batches()
    return next(iter(carrier.runner().run(batch).values()))


def error(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def step(ratio: float = 1 - (RANK + 1) / WIDTH, **options: Any) -> Any:
    given = {"criterion": "principal-components", "layers": KEPT, "reconstruct": False, **options}
    return declared(target={"ratio": ratio}, **given)


@pytest.fixture(scope="module")
def subspace() -> TorchCarrier:
    """A stream of ``RANK`` dimensions beside its mean, in none of its channels' directions."""
    carrier = module_of(PreNorm())
    normal = torch.randn((WIDTH, RANK), generator=torch.Generator().manual_seed(5)).double()
    basis = torch.linalg.qr(normal - normal.mean(0))[0]
    onto = (basis @ basis.T + 1 / WIDTH).float()
    changes = {}
    for name, tensor in carrier.tensors().items():
        if name.startswith("embed") or ".outer." in name:
            changes[name] = onto @ tensor.read()
        elif name == "places":
            changes[name] = tensor.read() @ onto
    after = carrier.with_weights(changes)
    assert isinstance(after, TorchCarrier)
    return after


class Repeated(PreNorm):
    """A block is computed twice."""

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](super().tokens(image))


@pytest.mark.parametrize("module", [PreNorm(), PreNorm(shift=False), Repeated()])
def test_a_turned_network_computes_the_same(module: nn.Module) -> None:
    before = module_of(module)
    found = to_components(before, data())
    assert error(outputs(found.carrier), outputs(before)) < 1e-5
    assert (np.diff(found.powers) <= 0).all()
    assert found.powers[1:].sum() == pytest.approx(1)
    turned = found.carrier.tensors()["embed.weight"].read()
    assert error(turned.numpy(), before.tensors()["embed.weight"].read().numpy()) > 0.1
    again = to_components(found.carrier, data())
    assert again.powers == pytest.approx(found.powers, rel=1e-3)


def test_a_stream_in_a_subspace_is_cut_without_loss(subspace: TorchCarrier) -> None:
    outcome = pruned(step(), subspace, data())
    after = outcome.carrier
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    assert after.tensors()["norm.weight"].shape == (RANK + 1,)
    assert error(outputs(after), outputs(subspace)) < 1e-4
    (module,) = after.module_outputs(next(iter(data(1, 9).batches())))
    assert error(module, outputs(subspace)) < 1e-4
    other = pruned(step(criterion="l2"), subspace, data())
    assert error(outputs(other.carrier), outputs(subspace)) > 1e-2


def test_rows_of_readers_may_go_beside(subspace: TorchCarrier) -> None:
    dead = torch.arange(24) % 4 != 1  # six of the hidden units do nothing
    changes = {
        f"blocks.{i}.{name}": subspace.tensors()[f"blocks.{i}.{name}"].read() * mask
        for i in range(2)
        for name, mask in (
            ("inner.weight", dead[:, None]),
            ("inner.bias", dead),
            ("outer.weight", dead),
        )
    }
    before = subspace.with_weights(changes)
    after = pruned(step(layers=[]), before, data()).carrier
    assert after.tensors()["blocks.0.inner.weight"].shape == (18, RANK + 1)
    assert error(outputs(after), outputs(before)) < 1e-4


def test_one_dimension_less_loses_something(subspace: TorchCarrier) -> None:
    outcome = pruned(step(1 - RANK / WIDTH), subspace, data())
    assert error(outputs(outcome.carrier), outputs(subspace)) > 1e-3


def test_what_was_cut_can_be_cut_again(subspace: TorchCarrier) -> None:
    once = pruned(step(2 / WIDTH), subspace, data()).carrier
    twice = pruned(step(2 / (WIDTH - 2)), once, data()).carrier
    assert twice.tensors()["norm.weight"].shape == (RANK + 1,)
    assert error(outputs(twice), outputs(subspace)) < 1e-4


def refusal(module: nn.Module) -> str:
    with pytest.raises(SpecError) as caught:
        step(layers=[]).survey(module_of(module), PassContext())
    assert caught.value.subject == "criterion principal-components"
    return str(caught.value)


class Scaled(PreNorm):
    """Something multiplies its channels."""

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return super().tokens(image) * self.places


class Unnormed(PreNorm):
    """A layer reads the stream itself."""

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].outer(self.blocks[0].inner(super().tokens(image)))


class PostNorm(PreNorm):
    """What a norm gives goes on in the stream."""

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(super().tokens(image))


class Shared(PreNorm):
    """Two layers behind different norms have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner = self.blocks[0].inner


class Lifted(PreNorm):
    """A number is added to all channels."""

    def tokens(self, image: torch.Tensor) -> torch.Tensor:
        return super().tokens(image) + image.mean((1, 2))[:, :, None]


class Two(nn.Module):
    """Two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(30, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))
        self.second = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(image.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Scaled, "Mul .* computes with its channels"),
        (Unnormed, "reads it without a norm"),
        (PostNorm, "takes what a norm gives: norms lie behind the sums, not before"),
        (Shared, "inner.weight' is the weight of two layers"),
        (Lifted, "adds the same to all its channels"),
        (Two, "layer norms read 2 streams, and one can be turned"),
    ],
)
def test_streams_that_cannot_be_turned(module: Any, why: str) -> None:
    message = refusal(module())
    assert re.search(why, message), message
    assert "choose another criterion" in message


HEADS, HEAD = 4, 8
WORDS = 48


def networks(kind: str, **more: Any) -> tuple[str, Any]:
    """Return the auto class of a kind, and a small network of it."""
    transformers = pytest.importorskip("transformers")
    width, words = HEADS * HEAD, {"vocab_size": WORDS, "max_position_embeddings": 64}
    usual = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    options: Mapping[str, Any] = {
        "gpt2": {"n_embd": width, "n_layer": 2, "n_head": HEADS, "tie_word_embeddings": False}
        | words,
        "opt": {**usual, **words, "ffn_dim": 64, "word_embed_proj_dim": width}
        | {"tie_word_embeddings": False},
        # Of one layer, as it runs with the quick tests; the stream goes through two in the others.
        "gpt_neox": {**usual, **words, "intermediate_size": 64, "num_hidden_layers": 1},
        "vit": {**usual, "intermediate_size": 64, "image_size": 16, "patch_size": 4},
    }[kind]
    auto = "AutoModelForImageClassification" if kind == "vit" else "AutoModelForCausalLM"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**options, **more})
    return auto, getattr(transformers, auto).from_config(config)


def saved(folder: Path, kind: str, **more: Any) -> TorchCarrier:
    """Save a network whose norms have scales and shifts, and open it."""
    auto, network = networks(kind, **more)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return open_pretrained(auto, folder, {}, ())


def given(kind: str, batches: int = 2, seed: int = 0) -> Given:
    random = np.random.default_rng(seed)
    if kind == "vit":
        images = (random.standard_normal((4, 3, 16, 16), np.float32) for _ in range(batches))
        return Given([{"pixel_values": image} for image in images])
    return Given([{"input_ids": random.integers(2, WORDS, (4, 24))} for _ in range(batches)])


KINDS = ("gpt_neox", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "opt", "vit")))


@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_transformers_keep_their_class(kind: str, tmp_path: Path) -> None:
    before, probe = saved(tmp_path / "m", kind), given(kind, 1, seed=9)
    turned = to_components(before, given(kind))
    assert error(outputs(turned.carrier, probe), outputs(before, probe)) < 1e-5
    cut = declared(target={"ratio": 0.25}, criterion="principal-components", round_to=HEADS - 1)
    after = pruned(cut, before, given(kind)).carrier
    out = tmp_path / "out"
    out.mkdir()
    LAYOUT.check(after)
    LAYOUT.write(after, out, USUAL)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    width, heads = (
        ("n_embd", "n_head") if kind == "gpt2" else ("hidden_size", "num_attention_heads")
    )
    assert (config[width], config[heads]) == ((HEADS - 1) * HEAD, HEADS - 1)
    again = open_pretrained(networks(kind)[0], out, {}, ())
    assert error(outputs(again, probe), outputs(after, probe)) < 1e-5


@pytest.mark.slow
def test_the_remedy_for_tied_embeddings_works(tmp_path: Path) -> None:
    tied = saved(tmp_path / "m", "gpt2", tie_word_embeddings=True)
    with pytest.raises(SpecError, match="copy that of the output layer, set tie_word_embeddings"):
        step(layers=[]).survey(tied, PassContext())
    network = networks("gpt2", tie_word_embeddings=True)[1].from_pretrained(tmp_path / "m")
    network.lm_head.weight = nn.Parameter(network.lm_head.weight.detach().clone())
    network.config.tie_word_embeddings = False
    network.save_pretrained(tmp_path / "own")
    own = open_pretrained("AutoModelForCausalLM", tmp_path / "own", {}, ())
    probe = given("gpt2", 1, seed=9)
    assert error(outputs(own, probe), outputs(tied, probe)) < 1e-6
    turned = to_components(own, given("gpt2"))
    assert error(outputs(turned.carrier, probe), outputs(tied, probe)) < 1e-5
