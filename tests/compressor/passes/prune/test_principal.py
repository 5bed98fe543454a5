"""``criterion: principal-components``: the residual stream turned, then cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.errors import DataError, ModelError, SpecError
from compressor.exporters import SafetensorsExporter
from compressor.graph.channels.analysis import map_channels
from compressor.models.checkpoint.carrier import open_checkpoint
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.carrier import open_pretrained
from compressor.passes.prepare.rotate import Rotate
from compressor.passes.prune.structured import principal
from compressor.passes.prune.structured.principal import to_components
from compressor.types.carrier import Carrier
from compressor.types.exporter import USUAL
from compressor.types.passes import PassContext
from tests.compressor.exporters.gguf.folders import WIDTH, WORDS, save
from tests.compressor.exporters.test_activation_formats import ran, spec
from tests.compressor.passes.prepare.test_rotate import ANY, saved, tokens_of
from tests.compressor.passes.prune.structured_models import Plain, Residual, declared, pruned
from tests.compressor.passes.prune.structured_models import carrier as module_of
from tests.compressor.passes.quantize.static_models import Given

CRITERION = "principal-components"
# What writes heads and hidden units of the MLP stays, so that only the stream is cut.
KEPT = [{"match": f"*{name}_proj", "skip": True} for name in ("q", "k", "v", "gate", "up")]
LAYOUT = SafetensorsExporter(layout="compressed-tensors")
RANK = 48  # of WIDTH


def texts(batches: int = 2, seed: int = 0) -> Given:
    random = np.random.default_rng(seed)
    return Given([{"input_ids": random.integers(2, WORDS, (4, 24))} for _ in range(batches)])


def opened(folder: Path) -> TorchCarrier:
    return open_pretrained("AutoModelForCausalLM", folder, {}, ())


def step(ratio: float = 1 - RANK / WIDTH, **options: Any) -> Any:
    given = {"criterion": CRITERION, "layers": KEPT, **options}
    return declared(target={"ratio": ratio}, **given)


def logits(carrier: Carrier) -> np.ndarray[Any, Any]:
    (batch,) = texts(1, seed=9).batches()
    return next(iter(carrier.runner().run(batch).values()))


def error(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def changed(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Change the weights of a saved network."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_a_subspace(folder: Path, kind: str = "llama-linear") -> Path:
    """Save a network whose stream has ``RANK`` dimensions, in none of its channels' directions."""
    normal = torch.randn((WIDTH, RANK), generator=torch.Generator().manual_seed(5))
    basis = torch.linalg.qr(normal.double())[0]
    onto = (basis @ basis.T).float()

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("embed_tokens.weight"):
            return 50 * tensor @ onto  # so large that the norms' epsilon does not matter
        return (
            10 * onto @ tensor if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        )

    return changed(saved(folder, kind), change)


@pytest.fixture(scope="module")
def subspace(tmp_path_factory: pytest.TempPathFactory) -> TorchCarrier:
    return opened(in_a_subspace(tmp_path_factory.mktemp("subspace") / "m"))


@pytest.mark.slow  # a quick one is with layer norms, and cuts the stream of a Llama below
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_a_turned_network_computes_the_same(kind: str, tmp_path: Path) -> None:
    before = opened(saved(tmp_path / "m", kind))
    found = to_components(before, texts())
    assert error(logits(found.carrier), logits(before)) < 1e-5
    assert found.error < 1e-5
    assert (np.diff(found.powers) <= 0).all()
    assert found.powers.sum() == pytest.approx(1)
    again = to_components(found.carrier, texts())  # the basis that it is in is that of components
    assert again.powers == pytest.approx(found.powers, rel=1e-3)


@pytest.mark.parametrize("reconstruct", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stream_in_a_subspace_is_cut_without_loss(
    subspace: TorchCarrier, reconstruct: bool
) -> None:
    outcome = pruned(step(reconstruct=reconstruct), subspace, texts())
    after = outcome.carrier
    assert isinstance(after, TorchCarrier)
    assert not after.executes_graph
    assert after.tensors()["model.embed_tokens.weight"].shape == (WORDS, RANK)
    assert error(logits(after), logits(subspace)) < 1e-4
    assert any(f"the {WIDTH - RANK} that went had" in note for note in outcome.notes)
    other = pruned(step(criterion="l2", reconstruct=reconstruct), subspace, texts())
    assert error(logits(other.carrier), logits(subspace)) > 1e-2


def test_a_cut_below_the_subspace_loses_something(subspace: TorchCarrier) -> None:
    outcome = pruned(step(0.5, reconstruct=False), subspace, texts())
    assert error(logits(outcome.carrier), logits(subspace)) > 1e-2


def test_other_channels_score_as_before(subspace: TorchCarrier) -> None:
    found = to_components(subspace, texts())
    groups = [g for g in map_channels(subspace.graph()).groups if not g.frozen]
    plain = [np.arange(len(group.units), dtype=np.float64) for group in groups]
    scores = found.scores(groups, plain)
    (place,) = (i for i, group in enumerate(groups) if group.name == found.stream.group.name)
    assert np.array_equal(scores[place], found.powers)
    assert all(s is p for i, (s, p) in enumerate(zip(scores, plain, strict=True)) if i != place)


@pytest.mark.slow
def test_the_export_is_the_module(subspace: TorchCarrier, tmp_path: Path) -> None:
    after = pruned(step(0.5), subspace, texts()).carrier
    assert isinstance(after, TorchCarrier)
    (batch,) = texts(1, seed=9).batches()
    (module,) = after.module_outputs(batch)
    assert error(module, logits(after)) < 1e-5
    out = tmp_path / "out"
    out.mkdir()
    LAYOUT.check(after)
    LAYOUT.write(after, out, USUAL)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["hidden_size"], config["head_dim"]) == (WIDTH // 2, 16)
    assert error(logits(opened(out)), module) < 1e-5


@pytest.mark.slow
def test_the_same_bytes_twice(subspace: TorchCarrier) -> None:
    first, second = (pruned(step(0.5), subspace, texts()).carrier.tensors() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(t.read(), second[name].read()) for name, t in first.items())


def test_what_was_saved_is_restored(subspace: TorchCarrier, tmp_path: Path) -> None:
    after = pruned(step(), subspace, texts()).carrier
    after.save(tmp_path)
    assert error(logits(subspace.restore(tmp_path)), logits(after)) == 0


@pytest.mark.slow
def test_it_can_be_cut_again(subspace: TorchCarrier) -> None:
    once = pruned(step(8 / WIDTH, reconstruct=False), subspace, texts()).carrier
    twice = pruned(step(8 / (WIDTH - 8), reconstruct=False), once, texts()).carrier
    assert twice.tensors()["lm_head.weight"].shape == (WORDS, RANK)
    assert error(logits(twice), logits(subspace)) < 1e-4


def test_a_turn_that_changes_outputs_is_an_error(
    subspace: TorchCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(carrier: Carrier, turns: Any) -> Carrier:
        name = "model.layers.1.mlp.down_proj.weight"
        turned = right(carrier, turns)
        return turned.with_weights({name: 2 * turned.tensors()[name].read()})

    right = principal.rotated
    monkeypatch.setattr(principal, "rotated", wrong)
    with pytest.raises(ModelError, match=f"criterion {CRITERION}.*outputs differ by"):
        pruned(step(), subspace, texts())


def test_no_samples_are_an_error(subspace: TorchCarrier) -> None:
    with pytest.raises(DataError, match="has no samples"):
        to_components(subspace, texts(0))


def refusal(carrier: Carrier, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        step(**options).survey(carrier, PassContext())
    assert caught.value.subject == f"criterion {CRITERION}"
    return str(caught.value)


@pytest.mark.parametrize("module", [Plain, Residual])
def test_networks_without_such_a_stream(module: Any) -> None:
    message = refusal(module_of(module()), layers=[])
    assert "knows no residual stream in a model of type" in message
    assert "choose another criterion" in message
    onnx = module_of(module())
    assert "knows no residual stream" in refusal(onnx.with_graph(onnx.graph()), layers=[])


@pytest.mark.slow
def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    save(tmp_path / "m", "gemma")
    assert "in a model of type 'gemma'" in refusal(opened(tmp_path / "m"))


def test_norms_behind_the_sum_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=40, num_hidden_layers=1, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    bert = open_pretrained("AutoModelForMaskedLM", tmp_path, {}, ())
    assert "norms lie behind the sums, not before" in refusal(bert, layers=[])


def test_a_stream_that_rules_keep(subspace: TorchCarrier) -> None:
    kept = [{"match": "*embed_tokens", "skip": True}]
    assert f"all its {WIDTH} channels stay: skipped by the rule" in refusal(subspace, layers=kept)


@pytest.mark.slow
def test_the_remedy_for_tied_embeddings_works(tmp_path: Path) -> None:
    tied = saved(tmp_path / "m", "llama-3")
    message = refusal(opened(tied))
    assert "cannot turn a module's tied embeddings" in message
    assert "run the pass rotate on the directory without model.factory" in message
    out = tmp_path / "out"
    out.mkdir()
    LAYOUT.write(Rotate().apply(open_checkpoint(tied), PassContext(), {}).carrier, out, USUAL)
    before = opened(out)
    step().survey(before, PassContext())
    assert len(principal.stream_of(before, map_channels(before.graph())).group.units) == WIDTH


def test_it_asks_for_calibration_data() -> None:
    assert step().replays == f"to score by {CRITERION}"


@pytest.mark.slow
def test_one_spec_cuts_exports_and_judges(tmp_path: Path) -> None:
    in_a_subspace(tmp_path / "float32")
    tokens_of(tmp_path)
    folder = str(tmp_path / "float32")
    one = {"pass": "prune-structured", "target": {"ratio": 0.25}, "criterion": CRITERION}
    keys = {
        "model": {"checkpoint": folder, "factory": "transformers.AutoModelForCausalLM"},
        "passes": [{**one, "layers": KEPT}],
        "limits": ANY,
    }
    report = ran(spec(tmp_path, "float32", {}, tmp_path / "out", **keys))
    artifact = report["artifacts"][0]
    value = artifact["metric"]["value"]
    assert value == pytest.approx(report["baseline"]["metric"]["value"], rel=1e-3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == RANK
