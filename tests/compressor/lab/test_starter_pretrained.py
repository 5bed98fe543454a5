"""A starter spec for a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from compressor.calibration.sources.tokens import TokenSource
from compressor.errors import ModelError, SpecError
from compressor.lab.quantizing import QuantizeOptions, quantization_spec
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.progress import quiet_libraries
from compressor.run.data import check_data, open_data
from compressor.run.model import open_model
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.models.test_pooling import directory as described
from tests.compressor.models.transformers_folders import SIZES, save

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def directory(folder: Path, **config: Any) -> Path:
    path = folder / "my model"
    path.mkdir()
    save_file({"w": torch.zeros(3, 4)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def written(model: Path, folder: Path, *, checked: bool = True) -> dict[str, Any]:
    output = folder / "spec.yaml"
    write_starter(model, output)
    text = output.read_text()
    assert not checked or "(1 tensors, 12 parameters)" in text
    assert max(map(len, text.splitlines())) <= 100
    spec: dict[str, Any] = YAML(typ="safe").load(text)
    return spec


@pytest.mark.parametrize("halves", [2, 3])
def test_bfloat16_is_widened_where_most_weights_are(tmp_path: Path, halves: int) -> None:
    model = directory(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    weights = {"a": torch.zeros(halves, 4).bfloat16(), "b": torch.zeros(2, 4), "n": torch.ones(99)}
    weights["n"] = weights["n"].long()
    save_file(weights, model / "model.safetensors")
    spec = written(model, tmp_path, checked=False)
    config = {"config": {"dtype": "float32"}} if halves == 3 else {}
    assert spec["model"] == {
        "factory": "transformers.AutoModelForCausalLM",
        "checkpoint": "my model",
        **config,
    }
    formats = [export["format"] for export in spec["exports"]]
    assert formats == (["onnx"] if halves == 3 else ["safetensors", "onnx"])


@pytest.mark.parametrize(
    ("name", "width", "first", "preset"),
    [
        ("h.0.mlp.up.weight", 576, [], "int4-g32"),
        ("h.0.mlp.up.weight", 640, [], "int4-g128"),
        ("h.0.mlp.up.weight", 40, [], "int4-g128"),  # no group divides it
        ("wte.weight", 576, [], "int4-g128"),  # a table, not a block's
        ("h.0.mlp.experts.gate_up_proj", 576, [{"pass": "fuse"}], "int4-g32"),
    ],
)
def test_widths_and_experts_of_a_language_model_choose_its_passes(
    name: str, width: int, first: list[dict[str, str]], preset: str, tmp_path: Path
) -> None:
    model = directory(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    save_file({name: torch.zeros(2, width), "x": torch.zeros(2, 2)}, model / "model.safetensors")
    spec = written(model, tmp_path, checked=False)
    weights = {"pass": "quantize-weights", "preset": preset, "method": "gptq"}
    assert spec["passes"] == [*first, weights]
    for format, wanted in (("compressed-tensors", preset), ("gguf", "int4-g32")):
        made = quantization_spec(model, tmp_path / "out", QuantizeOptions(format=format))
        assert made.document.value["passes"][0]["preset"] == wanted


def test_images_for_a_network_in_float16_are_floats(tmp_path: Path) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 8}
    model = directory(
        tmp_path,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        image_size=16,
        intermediate_size=8,
        dtype="float16",
        **size,
    )
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "a.png")
    write_starter(model, tmp_path / "spec.yaml", Choices(tmp_path / "images"))
    text = (tmp_path / "spec.yaml").read_text()
    spec = YAML(typ="safe").load(text)
    assert spec["model"]["config"] == {"dtype": "float32"}
    assert "# the weights are float16, " in text
    assert "pixel_values" in spec["data"]["evaluation"]["inputs"]


@pytest.mark.parametrize(("longest", "length"), [(256, 256), (4096, 512), (None, 512)])
def test_of_a_language_model(tmp_path: Path, longest: int | None, length: int) -> None:
    model = directory(
        tmp_path,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=longest,
    )
    spec = written(model, tmp_path)
    assert spec["model"] == {
        "factory": "transformers.AutoModelForCausalLM",
        "checkpoint": "my model",
    }
    evaluation = spec["data"]["evaluation"]
    assert evaluation["tokenizer"] == "my model"
    assert (evaluation["length"], evaluation["target"]) == (length, "labels")
    assert spec["metric"] == "perplexity"
    assert spec["passes"] == [{"pass": "quantize-weights", "preset": "int4-g128", "method": "gptq"}]
    assert spec["name"] == "my-model"


def test_images_for_a_language_model_are_refused(tmp_path: Path) -> None:
    model = directory(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / name)
    with pytest.raises(SpecError, match="is 2 images, which this model's spec does not take; give"):
        write_starter(model, tmp_path / "spec.yaml", Choices(tmp_path / "images"))


def test_of_other_models(tmp_path: Path) -> None:
    model = directory(
        tmp_path,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        image_size=224,
    )
    spec = written(model, tmp_path)
    assert spec["model"]["factory"] == "transformers.AutoModelForImageClassification"
    assert spec["data"]["calibration"]["inputs"] == {"pixel_values": "pixel_values"}
    assert [step["pass"] for step in spec["passes"]] == ["fuse", "quantize-static"]


def test_of_images_with_several_labels(tmp_path: Path) -> None:
    model = directory(
        tmp_path,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        image_size=224,
        problem_type="multi_label_classification",
    )
    assert written(model, tmp_path)["metric"] == "subset-accuracy"


def test_of_a_quantized_model(tmp_path: Path) -> None:
    model = directory(tmp_path, model_type="llama", quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelError, match="quantized already"):
        write_starter(model, tmp_path / "spec.yaml")
    assert not (tmp_path / "spec.yaml").exists()


def test_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    """The encoder, with the inputs that it has, and what suits it."""
    save(tmp_path / "speech", "whisper")
    output = tmp_path / "spec.yaml"
    write_starter(tmp_path / "speech", output)
    np.savez(tmp_path / "evaluation.npz", input_features=np.zeros((2, 8, 40), np.float32))
    spec = load_spec(output)
    assert spec.model.factory == "transformers.AutoModelForSpeechSeq2Seq"
    assert spec.model.part == "model.encoder"
    opened = open_model(spec)
    assert spec.data["evaluation"].keys.inputs == {i.name: i.name for i in opened.carrier.inputs}
    assert [step.name for step in spec.passes] == ["fuse", "quantize-dynamic"]
    # What the encoder becomes is not compared with a file that holds the decoder too.
    assert opened.own_bytes("safetensors") is None


def test_inputs_that_nobody_knows_are_left_to_fill_in(tmp_path: Path) -> None:
    model = directory(tmp_path, model_type="unheard-of", architectures=["UnheardOfModel"])
    assert written(model, tmp_path)["model"] == {
        "factory": "transformers.AutoModel",
        "checkpoint": "my model",
    }
    assert "  # inputs: # FILL IN" in (tmp_path / "spec.yaml").read_text()


def encoder(folder: Path, auto: str, config: Any, *, tokenizer: bool = True) -> Path:
    """Save a small encoder, with a tokenizer of two words."""
    path = folder / "encoder"
    with quiet_libraries():
        getattr(transformers, auto).from_config(config).save_pretrained(path)
    if tokenizer:
        words = Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.enable_padding(pad_id=1)
        words.save(str(path / "tokenizer.json"))
    return path


def roberta(**more: Any) -> Any:
    sizes = {**SIZES, "max_position_embeddings": 20, "type_vocab_size": 1, "pad_token_id": 1}
    return transformers.RobertaConfig(**sizes, **more)


@pytest.mark.parametrize(
    ("auto", "metric"),
    [
        ("AutoModel", "embedding"),
        ("AutoModelForSequenceClassification", "agreement"),
        ("AutoModelForTokenClassification", "token-accuracy"),
        ("AutoModelForMaskedLM", "token-accuracy"),
    ],
)
def test_of_an_encoder_of_text(tmp_path: Path, auto: str, metric: str) -> None:
    path = encoder(tmp_path, auto, roberta())
    write_starter(path, tmp_path / "spec.yaml")
    assert max(map(len, (tmp_path / "spec.yaml").read_text().splitlines())) <= 100
    (tmp_path / "calibration.txt").write_text("a a\na\n")
    (tmp_path / "evaluation.txt").write_text("a a\n")
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.model.factory == f"transformers.{auto}"
    assert spec.metric == metric
    assert [step.name for step in spec.passes] == ["fuse", "quantize-static"]
    assert [export.format for export in spec.exports] == ["onnx"]
    carrier = open_model(spec).carrier
    assert [i.name for i in carrier.inputs] == list(TEXT_INPUTS[:2])  # it has one type of tokens
    data = open_data(spec, carrier.inputs, ())
    for entry in data.values():
        check_data(entry, carrier.inputs)
    assert [entry.batch for entry in data.values()] == [1, 32]  # ranges are not those of padding
    assert data["calibration"].first(2)["attention_mask"].tolist() == [[1, 1], [1, 0]]
    # The first of its positions is padding's.
    assert spec.data["calibration"].options.length == 18  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("task", "line", "field", "target", "metric"),
    [
        ("Sequence", {"text": "a", "label": "x"}, "text", "label", "accuracy"),
        ("Sequence", {"n": 1, "body": "a", "note": "a"}, "body", None, "agreement"),
        ("Token", {"ner_tags": ["x"], "words": ["a"]}, "words", "ner_tags", "token-accuracy"),
    ],
)
def test_lines_of_json_take_the_place_of_text(
    tmp_path: Path, task: str, line: dict[str, Any], field: str, target: str | None, metric: str
) -> None:
    """init refused the file whose kind its own help names."""
    path = encoder(tmp_path, f"AutoModelFor{task}Classification", roberta())
    data = tmp_path / "lines.jsonl"
    data.write_text(f"{json.dumps(line)}\n" * 4)
    choices = Choices(data=data)
    assert not write_starter(path, tmp_path / "spec.yaml", choices)
    spec = load_spec(tmp_path / "spec.yaml")
    entry = spec.data["evaluation"]
    assert (entry.kind, entry.options.field) == ("jsonl", field)  # type: ignore[union-attr]
    assert (entry.keys.target, spec.metric) == (target, metric)
    data.write_text('{"n": 1}\n')
    with pytest.raises(SpecError, match="has no text in its first object; give objects"):
        write_starter(path, tmp_path / "other.yaml", choices)


def test_of_an_encoder_that_scores_texts(tmp_path: Path) -> None:
    path = encoder(tmp_path, "AutoModelForSequenceClassification", roberta(num_labels=1))
    assert written(path, tmp_path, checked=False)["metric"] == "spearman"


@pytest.mark.parametrize("target", [None, "labels"])
def test_of_texts_with_several_labels(tmp_path: Path, target: str | None) -> None:
    """init wrote accuracy, which takes one class a sample, or agreement of the largest score."""
    config = roberta(num_labels=3, problem_type="multi_label_classification")
    path = encoder(tmp_path, "AutoModelForSequenceClassification", config)
    data = tmp_path / "lines.jsonl"
    answer = {} if target is None else {target: [0.0, 1.0, 1.0]}
    data.write_text(f"{json.dumps({'text': 'a', **answer})}\n" * 4)
    assert not write_starter(path, tmp_path / "spec.yaml", Choices(data=data))
    spec = load_spec(tmp_path / "spec.yaml")
    assert (spec.data["evaluation"].keys.target, spec.metric) == (target, "subset-accuracy")
    whole = encoder(tmp_path / "whole", "AutoModel", config)
    (tmp_path / "spec.yaml").unlink()
    assert written(whole, tmp_path, checked=False)["metric"] == "embedding"


def test_of_an_encoder_that_answers_questions(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=16)
    path = encoder(tmp_path, "AutoModelForQuestionAnswering", config)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    write_starter(path, tmp_path / "spec.yaml")
    for role in ("calibration", "evaluation"):
        (tmp_path / f"{role}.jsonl").write_text('{"question": "a", "context": "a a"}\n')
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.metric == "span-accuracy"
    assert list(spec.model.inputs) == list(TEXT_INPUTS)
    options = spec.data["evaluation"].options
    assert isinstance(options, TokenSource)
    assert options.length == 12
    assert next(options.batches(1))["input_ids"].tolist() == [[0, 0, 0]]


def test_of_an_encoder_without_a_tokenizer(tmp_path: Path) -> None:
    path = encoder(tmp_path, "AutoModel", roberta(), tokenizer=False)
    write_starter(path, tmp_path / "spec.yaml")
    text = (tmp_path / "spec.yaml").read_text()
    assert "npz: evaluation.npz" in text
    assert "quantize-dynamic" in text


@pytest.mark.parametrize(
    ("kind", "factory"), [("Pooling", "AutoModel"), ("SpladePooling", "AutoModelForCausalLM")]
)
def test_a_decoder_of_vectors_is_no_language_model(kind: str, factory: str, tmp_path: Path) -> None:
    """Its config.json names a class that continues texts all the same."""
    sizes = {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 1, "eos_token_id": 1}
    path = encoder(tmp_path, "AutoModelForCausalLM", transformers.Qwen3Config(**SIZES, **sizes))
    described(path, (kind, {"pooling_mode": "lasttoken"}))
    spec = written(path, tmp_path, checked=False)
    assert spec["model"]["factory"] == f"transformers.{factory}"
    assert spec["metric"] == ("embedding" if factory == "AutoModel" else "perplexity")
    if factory == "AutoModel":
        assert list(spec["model"]["inputs"]) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(("module", "metric"), [("Pooling", "embedding"), ("LSTM", "cosine")])
def test_a_vector_is_judged_as_the_directory_makes_it(
    module: str, metric: str, tmp_path: Path
) -> None:
    """The mean over tokens was judged, whatever modules.json said."""
    path = encoder(tmp_path, "AutoModel", roberta())
    described(path, (module, {"pooling_mode": "cls"}))
    assert written(path, tmp_path, checked=False)["metric"] == metric
    text = (tmp_path / "spec.yaml").read_text()
    if metric == "cosine":
        assert "'1_LSTM' of modules.json is LSTM" in text
        return
    assert "that of its first" in text
    for role in ("calibration", "evaluation"):
        (tmp_path / f"{role}.txt").write_text(f"a a\na\n{role}\n")
    planned = make_plan(load_spec(tmp_path / "spec.yaml")).metric
    assert planned is not None
    ours, theirs = np.zeros((2, 1, 3, 4))
    ours[:, 0], theirs[:, 0], theirs[:, 1] = 1.0, 1.0, -9.0
    assert planned.per_sample({"h": ours}, {"h": theirs}, 1) == pytest.approx([1.0])
