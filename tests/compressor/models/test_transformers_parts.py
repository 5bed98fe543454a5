"""Networks saved without what only the whole has, such as the encoder of a T5 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import ModelError
from compressor.lab.starter import write_starter
from compressor.models.transformers.carrier import open_pretrained
from compressor.models.transformers.classes import auto_class_for, loading_class, saved_from
from compressor.models.transformers.networks import read_config
from compressor.progress import quiet_libraries
from tests.compressor.models.transformers_folders import KINDS, SIZES

T5 = KINDS["t5"][2]
SMALL_EXPERTS = {**T5, "num_sparse_encoder_layers": 1, "num_experts": 2}
# The class that was saved, its configuration, and the classes that open it here and in general.
PARTS: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("T5EncoderModel", "T5Config", T5, "AutoModelForTextEncoding", "AutoModelForTextEncoding"),
    ("MT5EncoderModel", "MT5Config", T5, "AutoModelForTextEncoding", "AutoModelForTextEncoding"),
    ("UMT5EncoderModel", "UMT5Config", T5, "AutoModelForTextEncoding", "AutoModelForTextEncoding"),
    ("LongT5EncoderModel", "LongT5Config", T5, "AutoModel", "LongT5EncoderModel"),
    (
        "SwitchTransformersEncoderModel",
        "SwitchTransformersConfig",
        SMALL_EXPERTS,
        "AutoModel",
        "SwitchTransformersEncoderModel",
    ),
    ("DPRContextEncoder", "DPRConfig", SIZES, "AutoModel", "DPRContextEncoder"),
    ("DPRQuestionEncoder", "DPRConfig", SIZES, "AutoModel", "AutoModel"),
    (
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        {**SIZES, "projection_dim": 16},
        "AutoModel",
        "CLIPTextModelWithProjection",
    ),
]


def save(folder: Path, named: str, config: str, values: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    with quiet_libraries():
        made = getattr(transformers, named)(getattr(transformers, config)(**values))
        made.save_pretrained(folder)
    network: torch.nn.Module = made.eval()
    return network


@pytest.mark.parametrize(
    ("named", "config", "values", "auto", "opener"), PARTS, ids=[part[0] for part in PARTS]
)
def test_a_part_that_was_saved_alone_is_opened_as_it_was_saved(
    tmp_path: Path, named: str, config: str, values: dict[str, Any], auto: str, opener: str
) -> None:
    """AutoModel asked the file of a T5 encoder for the weights of a decoder."""
    network = save(tmp_path / "part", named, config, values)
    content = read_config(tmp_path / "part")
    assert auto_class_for(saved_from(content)) == auto
    assert loading_class(content) == opener
    write_starter(tmp_path / "part", tmp_path / "spec.yaml")
    text = (tmp_path / "spec.yaml").read_text()
    assert f"factory: transformers.{auto}\n" in text
    assert "part:" not in text  # it has no other side
    carrier = open_pretrained(auto, tmp_path / "part", {}, ())
    assert type(carrier.module).__name__ == named
    ids = torch.arange(1, 13).reshape(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(carrier.module(ids)[0], network(ids)[0])


def test_the_message_names_the_class_that_fits(tmp_path: Path) -> None:
    save(tmp_path, "T5EncoderModel", "T5Config", T5)
    with pytest.raises(
        ModelError,
        match=r"lacks 'decoder\..* of T5Model; use transformers\.AutoModelForTextEncoding: "
        "it was saved from T5EncoderModel",
    ):
        open_pretrained("AutoModel", tmp_path, {}, ())


def test_weights_outside_the_part_may_be_missing(tmp_path: Path) -> None:
    network = save(tmp_path, "T5EncoderModel", "T5Config", T5)
    carrier = open_pretrained("AutoModel", tmp_path, {}, (), "encoder")
    ids = torch.arange(1, 13).reshape(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(carrier.module(ids)[0], network(ids)[0])


@pytest.mark.parametrize(
    "name", ["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"]
)
def test_weights_of_the_part_may_not(tmp_path: Path, name: str) -> None:
    """The table of embeddings has its name outside of the encoder, which reads it."""
    save(tmp_path, "T5EncoderModel", "T5Config", T5)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"lacks .*'{name}' of T5Model"):
        open_pretrained("AutoModel", tmp_path, {}, (), "encoder")
