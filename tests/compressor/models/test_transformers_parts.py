"""Networks saved without what only the whole has, such as the encoder of a T5 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from compressor.errors import ModelError, SpecError
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.models.transformers.carrier import open_pretrained, sides_of
from compressor.models.transformers.classes import auto_class_for, loading_class, saved_from
from compressor.models.transformers.networks import read_config
from compressor.progress import quiet_libraries
from compressor.run.model import open_model
from compressor.spec.load import load_spec
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


def saved_clip(folder: Path) -> Path:
    text = {**SIZES, "max_position_embeddings": 16}
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    with quiet_libraries():
        transformers.CLIPModel(config).save_pretrained(folder / "clip")
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    words.save(str(folder / "clip" / "tokenizer.json"))
    return folder / "clip"


@pytest.mark.parametrize(
    ("data", "part", "inputs"),
    [
        (None, "vision_model", ["pixel_values"]),
        ("lines.txt", "text_model", ["input_ids", "attention_mask"]),
        ("arrays.npz", "text_model", ["input_ids", "attention_mask"]),
    ],
)
def test_a_network_of_two_sides_is_begun_with_the_one_that_the_data_are_for(
    data: str | None, part: str, inputs: list[str], tmp_path: Path
) -> None:
    """The spec was of both sides, and named the inputs of one."""
    path = saved_clip(tmp_path)
    if data == "arrays.npz":
        (path / "tokenizer.json").unlink()
        tokens = np.zeros((4, 6), np.int64)
        np.savez(tmp_path / data, input_ids=tokens)
        inputs = inputs[:1]
    (tmp_path / "lines.txt").write_text("a\na a\na a a\n")
    write_starter(path, tmp_path / "spec.yaml", Choices(data=data and tmp_path / data))
    for role in ("calibration", "evaluation"):
        np.savez(tmp_path / f"{role}.npz", pixel_values=np.zeros((4, 3, 32, 32), np.float32))
    text = (tmp_path / "spec.yaml").read_text()
    other = "text_model" if part == "vision_model" else "vision_model"
    assert f"for the other, write another spec with part: {other}" in text
    assert max(map(len, text.splitlines())) <= 100
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.model.part == part
    assert spec.metric in (None, "cosine")
    carrier = open_model(spec).carrier
    assert [i.name for i in carrier.inputs] == inputs
    carrier.graph()
    with pytest.raises(SpecError, match="take one side: part: text_model or vision_model"):
        open_pretrained("AutoModel", path, {}, ())


def test_a_network_of_one_side_has_none() -> None:
    """Layers for other kinds of data are no sides."""
    with torch.device("meta"):
        for name in ("BertModel", "T5Model", "WhisperModel", "LayoutLMv3Model", "ViltModel"):
            network = getattr(transformers, name)
            assert sides_of(network(network.config_class())) == {}, name
