"""Text in windows is for causal models: an error where it is given to another, a doubt where none
knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from compressor.errors import SpecError
from compressor.models.transformers.lengths import piece_length, positions_of
from compressor.models.transformers.networks import is_causal
from compressor.progress import quiet_libraries
from compressor.run.causal import check_windows, window_doubts
from compressor.run.model import open_model
from compressor.spec.load import Spec, load_spec
from tests.compressor.models.transformers_folders import SIZES, change, save


@pytest.mark.parametrize(
    ("config", "part", "causal"),
    [
        ({"model_type": "llama"}, None, True),
        ({"model_type": "gpt2"}, None, True),
        ({"model_type": "bert"}, None, False),
        ({"model_type": "bert", "is_decoder": True}, None, True),
        ({"model_type": "roberta", "is_decoder": False}, None, False),
        ({"model_type": "modernbert"}, None, False),
        ({"model_type": "t5", "is_encoder_decoder": True}, None, None),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder", False),
        ({"model_type": "bart", "is_encoder_decoder": True}, "model.decoder", None),
        ({"model_type": "clip_text_model"}, None, None),
    ],
)
def test_what_a_configuration_says(
    config: dict[str, Any], part: str | None, causal: bool | None
) -> None:
    assert is_causal(config, part) is causal


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}, "max_position_embeddings": 7}, 32),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic"}}, None),
        ({"max_position_embeddings": 128, "rope_parameters": {"rope_type": "llama3"}}, 128),
        ({"max_position_embeddings": 2048, "alibi": True}, None),
        ({}, None),
    ],
)
def test_how_many_positions_a_configuration_states(
    config: dict[str, Any], most: int | None
) -> None:
    assert positions_of(config) == most
    assert piece_length(config) == min(most or 512, 512)


def spec(folder: Path, model: str, *more: str, data: str = "", length: int = 1) -> Spec:
    (folder / "lines.txt").write_text("abc\n")
    tokenizer = folder / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?")).save(str(tokenizer))
    path = folder / "spec.yaml"
    lines = [
        "version: 1",
        "name: text",
        f"model: {model}",
        "data:",
        f"  calibration: {{text: lines.txt, tokenizer: tokenizer.json, length: {length}{data}}}",
        *more,
        "exports: [{format: onnx}]",
    ]
    path.write_text("\n".join(lines))
    return load_spec(path)


BERT = "{factory: transformers.AutoModelForSequenceClassification, checkpoint: bert}"


def test_windows_for_an_encoder_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "bert", "bert")
    with pytest.raises(
        SpecError,
        match=r"spec\.yaml:5: data\.calibration: cuts text into windows .* no causal language "
        "model; set samples-per: line",
    ):
        check_windows(spec(tmp_path, BERT))
    lines = spec(tmp_path, BERT, data=", samples-per: line, padding: length")
    check_windows(lines)
    assert not window_doubts(lines)
    change(tmp_path / "bert", is_decoder=True)
    check_windows(spec(tmp_path, BERT))


def test_windows_of_more_tokens_than_the_model_has_positions_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "llama", "llama")
    change(tmp_path / "llama", max_position_embeddings=48)
    for model in (
        "{checkpoint: llama}",
        "{factory: transformers.AutoModelForCausalLM, checkpoint: llama}",
    ):
        check_windows(spec(tmp_path, model, length=48))
        with pytest.raises(SpecError, match=r"49 tokens, and the model was made for 48.* to 48"):
            check_windows(spec(tmp_path, model, length=49))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("bert", {"max_position_embeddings": 24}),
        ("roberta", {"max_position_embeddings": 26, "pad_token_id": 1}),
        ("clip_text_model", {"max_position_embeddings": 24}),
    ],
)
def test_lines_of_more_tokens_than_the_model_has_positions_are_an_error(
    model: str, config: dict[str, Any], tmp_path: Path
) -> None:
    sizes = transformers.CONFIG_MAPPING[model](**SIZES, **config)
    with quiet_libraries():
        transformers.AutoModel.from_config(sizes).save_pretrained(tmp_path / model)
    written = f"{{factory: transformers.AutoModel, checkpoint: {model}}}"
    lines = ", samples-per: line"
    open_model(spec(tmp_path, written, data=lines, length=24))
    wanted = r"spec\.yaml:5: data\.calibration\.length: is 25, .* for 24 tokens; set length: 24"
    with pytest.raises(SpecError, match=wanted):
        open_model(spec(tmp_path, written, data=lines, length=25))


def test_windows_for_a_model_of_which_nothing_is_known(tmp_path: Path) -> None:
    unknown = spec(tmp_path, "{onnx: model.onnx}")
    check_windows(unknown)
    (doubt,) = window_doubts(unknown)
    assert doubt.startswith("data.calibration: text is cut into windows")
    assert "set samples-per: line" in doubt
    # What is judged by the next token is meant as a causal model.
    assert not window_doubts(spec(tmp_path, "{onnx: model.onnx}", "metric: perplexity"))
    assert not window_doubts(spec(tmp_path, "{onnx: m.onnx}", "metric: {name: perplexity}"))
