"""The vector of a text is the one that the model's directory describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compressor.errors import ModelError, SpecError
from compressor.models.transformers.pooling import pooling_of

# Two tokens count in each text, after padding or before it.
TOKENS = np.array([[[1.0, -2.0], [3.0, 4.0], [0, 0]], [[0, 0], [5.0, 1.0], [2.0, 2.0]]])
VECTORS = {
    "cls": [[1, -2], [5, 1]],
    "lasttoken": [[3, 4], [2, 2]],
    "max": [[3, 4], [5, 2]],
    "mean": [[2, 1], [3.5, 1.5]],
    "weightedmean": [[7 / 3, 2], [3, 5 / 3]],
}
CLS, MEAN = "pooling_mode_cls_token", "pooling_mode_mean_tokens"


def directory(folder: Path, *modules: tuple[str, dict[str, Any]]) -> Path:
    """Write the files of sentence-transformers about what follows a network."""
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules):
        place = f"{index + 1}_{kind}"
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text(json.dumps(config))
        listed.append({"path": place, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("mode", VECTORS)
def test_tokens_make_the_vector_that_is_described(mode: str, tmp_path: Path) -> None:
    pooling = pooling_of(
        directory(tmp_path, ("Pooling", {"pooling_mode": mode}), ("Normalize", {}))
    )
    np.testing.assert_allclose(pooling.vectors(TOKENS), VECTORS[mode])
    assert bool(pooling.digest) is (mode != "mean")


def test_several_vectors_are_joined_as_older_files_say(tmp_path: Path) -> None:
    config = {"word_embedding_dimension": 2, MEAN: True, CLS: True}
    vectors = pooling_of(directory(tmp_path, ("Pooling", config))).vectors(TOKENS)
    np.testing.assert_allclose(vectors, np.hstack([VECTORS["cls"], VECTORS["mean"]]))


def test_without_modules_it_is_the_mean(tmp_path: Path) -> None:
    assert pooling_of(tmp_path).modes == ("mean",)
    assert pooling_of(directory(tmp_path)).modes == ("mean",)
    assert not pooling_of(tmp_path).vectors(np.zeros((1, 3, 2))).any()


@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Tanh"])
def test_layers_follow(activation: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 3)
    config = {"activation_function": f"torch.nn.modules.{activation}"}
    folder = directory(tmp_path, ("Pooling", {MEAN: True}), ("Dense", config))
    stored = {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}
    save_file(stored, folder / "2_Dense" / "model.safetensors")
    expected = layer(torch.tensor(VECTORS["mean"], dtype=torch.float32))
    expected = expected.tanh() if activation.endswith("Tanh") else expected
    pooling = pooling_of(folder)
    np.testing.assert_allclose(pooling.vectors(TOKENS), expected.detach().numpy(), rtol=1e-5)
    assert pooling.words() == "the mean over its tokens, through the layers that follow"
    torch.save({"linear.weight": torch.zeros(3, 4)}, folder / "2_Dense" / "pytorch_model.bin")
    save_file({**stored, "linear.bias": torch.ones(3)}, folder / "2_Dense" / "model.safetensors")
    assert pooling_of(folder).digest != pooling.digest
    save_file({"other": torch.ones(3)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no linear\.weight"):
        pooling_of(folder)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (("LSTM", {}), "'1_LSTM' of modules.json is LSTM; use cosine"),
        (("Pooling", {"pooling_mode": "best"}), "is pooling_mode 'best'"),
        (("Dense", {"activation_function": "torch.nn.GELU"}), r"is a Dense with torch\.nn\.GELU"),
    ],
)
def test_what_is_not_computed_is_refused(module: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        pooling_of(directory(tmp_path, module))
