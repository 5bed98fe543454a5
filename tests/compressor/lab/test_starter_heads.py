"""What a starter spec for a Hugging Face directory is judged by: that of its head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.errors import SpecError
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.lab.starter_heads import head_metric
from compressor.models.transformers.carrier import encoder_path, usual_inputs
from compressor.progress import quiet_libraries
from compressor.run.data import check_data, open_data
from compressor.run.model import open_model
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from compressor.types.tensors import TensorSpec
from tests.compressor.lab.test_starter_pretrained import encoder, roberta, written
from tests.compressor.models.transformers_folders import SIZES, TWO_SIDED

CLASSES = "AutoModelForSequenceClassification"
PICTURES = {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 3}


def bert(**more: Any) -> Any:
    return transformers.BertConfig(**SIZES, max_position_embeddings=16, **more)


def lines(folder: Path, **fields: Any) -> Choices:
    data = folder / "lines.jsonl"
    data.write_text(f"{json.dumps(fields)}\n" * 4)
    return Choices(data=data)


def started(path: Path, folder: Path, choices: Choices) -> Any:
    write_starter(path, folder / "spec.yaml", choices)
    return load_spec(folder / "spec.yaml")


@pytest.mark.parametrize(
    ("labels", "fields", "pair", "target", "metric"),
    [
        (1, {"sentence1": "a", "sentence2": "a", "label": 0.5}, "sentence2", "label", "spearman"),
        (1, {"query": "a", "passage": "a", "score": 0.5}, "passage", "score", "spearman"),
        (1, {"premise": "a", "hypothesis": "a", "label": "x"}, "hypothesis", None, "spearman"),
        (3, {"premise": "a", "hypothesis": "a", "label": 1}, "hypothesis", "label", "accuracy"),
        (3, {"query": "a", "passage": "a", "score": 0.5}, "passage", None, "agreement"),
        (3, {"text": "a", "title": "a"}, None, None, "agreement"),
    ],
)
def test_models_of_pairs_read_both_texts(
    tmp_path: Path, labels: int, fields: dict[str, Any], pair: str | None, target: Any, metric: str
) -> None:
    """init named the first text alone, and a run judged half of each sample."""
    path = encoder(tmp_path, CLASSES, roberta(num_labels=labels))
    spec = started(path, tmp_path, lines(tmp_path, **fields))
    for entry in spec.data.values():
        assert (entry.options.field, entry.options.text_pair) == (next(iter(fields)), pair)
    assert (spec.data["evaluation"].keys.target, spec.metric) == (target, metric)
    unsure = "    # text-pair: title # CHECK: set it if the model reads pairs\n"
    assert (unsure in (tmp_path / "spec.yaml").read_text()) == ("title" in fields)


@pytest.mark.parametrize("label", [[0.5, 1.5], "x", None])
def test_several_numbers_are_not_judged_by_the_largest(tmp_path: Path, label: Any) -> None:
    config = roberta(num_labels=2, problem_type="regression")
    path = encoder(tmp_path, CLASSES, config)
    fields = {"text": "a"} if label is None else {"text": "a", "label": label}
    spec = started(path, tmp_path, lines(tmp_path, **fields))
    answered = isinstance(label, list)
    expected = "label" if answered else None
    assert (spec.metric, spec.data["evaluation"].keys.target) == ("mse", expected)
    assert make_plan(spec).metric is not None


def test_whether_a_text_follows_is_asked_of_pairs(tmp_path: Path) -> None:
    path = encoder(tmp_path, "AutoModelForNextSentencePrediction", bert())
    spec = started(path, tmp_path, lines(tmp_path, first="a", next="a a", label=1))
    options = spec.data["evaluation"].options
    assert (options.field, options.text_pair) == ("first", "next")
    assert (spec.metric, spec.data["evaluation"].keys.target) == ("accuracy", "label")


def test_a_choice_between_texts_needs_arrays(tmp_path: Path) -> None:
    """init wrote lines of text, one a sample, and the mean of scores as a text's vector."""
    path = encoder(tmp_path, "AutoModelForMultipleChoice", bert())
    with pytest.raises(SpecError, match="does not take; give arrays"):
        started(path, tmp_path, lines(tmp_path, text="a"))
    tokens = np.ones((4, 3, 5), np.int64)
    names = ("input_ids", "attention_mask", "token_type_ids")
    np.savez(tmp_path / "all.npz", label=np.arange(4) % 3, **dict.fromkeys(names, tokens))
    spec = started(path, tmp_path, Choices(tmp_path / "all.npz"))
    assert (spec.metric, spec.data["evaluation"].keys.target) == ("accuracy", "label")
    opened = open_model(spec)
    assert opened.carrier.inputs[0].shape == ("batch", "choices", "sequence")
    for entry in open_data(spec, opened.carrier.inputs, ()).values():
        check_data(entry, opened.carrier.inputs)


POSITIONS = {**SIZES, "max_position_embeddings": 16, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (transformers.LayoutLMConfig(**POSITIONS), {"bbox": ["sequence", 4]}),
        (transformers.LiltConfig(**POSITIONS), {"bbox": ["sequence", 4]}),
        (transformers.TapasConfig(**POSITIONS), {"token_type_ids": ["sequence", 7]}),
        (
            transformers.MarkupLMConfig(**POSITIONS, max_depth=5),
            {"xpath_tags_seq": ["sequence", 5], "xpath_subs_seq": ["sequence", 5]},
        ),
        (
            transformers.RoCBertConfig(**POSITIONS),
            {"input_shape_ids": ["sequence"], "input_pronunciation_ids": ["sequence"]},
        ),
        (
            transformers.LayoutLMv3Config(**POSITIONS, input_size=16, coordinate_size=6),
            {"bbox": ["sequence", 4], "pixel_values": [3, 16, 16]},
        ),
    ],
)
def test_what_a_network_reads_beside_text_is_an_input(
    tmp_path: Path, config: Any, shapes: dict[str, list[Any]]
) -> None:
    """init wrote lines of text, and zeros in place of these were built into the graph."""
    path = encoder(tmp_path, CLASSES, config)
    with pytest.raises(SpecError, match=r"give arrays \(.*\) of input_ids, attention_mask, "):
        started(path, tmp_path, lines(tmp_path, text="a"))
    spec = written(path, tmp_path, checked=False)
    written_shapes = {name: entry["shape"] for name, entry in spec["model"]["inputs"].items()}
    for name, axes in {"attention_mask": ["sequence"], **shapes}.items():
        assert written_shapes[name] == ["batch", *axes]
    assert spec["data"]["evaluation"]["inputs"].keys() == written_shapes.keys()
    with quiet_libraries():
        network = getattr(transformers, CLASSES).from_config(config)
    assert {i.name for i in usual_inputs(network)} == {"input_ids", *shapes}


def test_what_else_forward_takes_is_told(tmp_path: Path) -> None:
    config = transformers.LongformerConfig(**POSITIONS, attention_window=4)
    written(encoder(tmp_path, CLASSES, config), tmp_path, checked=False)
    line = "    # CHECK: it gets none of what forward takes besides: 'global_attention_mask'\n"
    assert line in (tmp_path / "spec.yaml").read_text()


@pytest.mark.parametrize(
    ("auto", "config", "metric"),
    [
        ("PreTraining", transformers.ElectraConfig(**SIZES, embedding_size=32), "mse"),
        ("PreTraining", bert(), "token-accuracy"),
        ("TokenClassification", roberta(num_labels=1), "mse"),
        (
            "TokenClassification",
            roberta(num_labels=3, problem_type="multi_label_classification"),
            "mse",
        ),
    ],
)
def test_other_heads_make_no_vector_of_a_text(
    tmp_path: Path, auto: str, config: Any, metric: str
) -> None:
    path = encoder(tmp_path, f"AutoModelFor{auto}", config)
    assert written(path, tmp_path, checked=False)["metric"] == metric


def test_the_encoder_of_a_classifier_with_a_decoder_gives_no_classes(tmp_path: Path) -> None:
    """The largest of a hidden state's values was judged as its answer."""
    sides = {f"{side}_{key}": 1 for side in ("encoder", "decoder") for key in ("layers", "ffn_dim")}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    config = transformers.BartConfig(
        vocab_size=37, d_model=16, max_position_embeddings=16, **sides, **heads
    )
    path = encoder(tmp_path, CLASSES, config)
    spec = started(path, tmp_path, lines(tmp_path, text="a", label=1))
    assert (spec.model.part, spec.metric) == ("model.encoder", "embedding")
    assert spec.data["evaluation"].keys.target is None


@pytest.mark.parametrize(
    ("name", "config", "metric"),
    [
        ("ViTForImageClassification", {}, "agreement"),
        ("ViTForImageClassification", {"problem_type": "regression"}, "mse"),
        ("ViTForImageClassification", {"num_labels": 1}, "mse"),
        ("Wav2Vec2ForSequenceClassification", {}, "agreement"),
        ("Wav2Vec2ForAudioFrameClassification", {}, "# metric: accuracy"),
        ("SegformerForSemanticSegmentation", {}, "agreement"),
        ("DPTForDepthEstimation", {}, "mse"),
        ("PatchTSTForPrediction", {}, "mse"),
        ("PatchTSTForRegression", {}, "mse"),
        ("PatchTSTForClassification", {}, "agreement"),
        ("BertForNextSentencePrediction", {}, "agreement"),
        ("Wav2Vec2ForCTC", {"pad_token_id": 0}, "character-error-rate"),
        ("Wav2Vec2ForCTC", {"pad_token_id": 3}, "agreement"),
        ("ViTModel", {}, "# metric: accuracy"),
    ],
)
def test_a_head_decides_what_it_is_judged_by(
    name: str, config: dict[str, Any], metric: str
) -> None:
    described = transformers.PreTrainedConfig(**{"num_labels": 3, **config})
    assert metric in head_metric(name, described)[0].splitlines()[-1]


def test_inputs_of_other_kinds_of_networks() -> None:
    """init wrote tokens as their inputs."""
    batch, dtype = "batch", "float32"
    _, name, sizes = TWO_SIDED["whisper"]
    heard = getattr(transformers, name)(**sizes, num_labels=3)
    wide = transformers.ViTConfig(**{**PICTURES, "image_size": [8, 16]})
    sides = {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8, "num_labels": 3}
    filmed = transformers.VideoMAEConfig(**PICTURES, num_frames=2)
    patched = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4}
    spectra = transformers.ASTConfig(**SIZES, **patched, max_length=12, num_mel_bins=8)
    series = transformers.PatchTSTConfig(context_length=16, num_input_channels=2, d_model=16)
    both = transformers.CLIPConfig(text_config=SIZES, vision_config=PICTURES)
    nets = [
        (transformers.WhisperForAudioClassification, heard, ("input_features", batch, 8, 40)),
        (transformers.ViTForImageClassification, wide, ("pixel_values", batch, 3, 8, 16)),
        (
            transformers.ResNetForImageClassification,
            transformers.ResNetConfig(**sides),
            ("pixel_values", batch, 3, "height", "width"),
        ),
        (
            transformers.VideoMAEForVideoClassification,
            filmed,
            ("pixel_values", batch, 2, 3, 16, 16),
        ),
        (transformers.ASTForAudioClassification, spectra, ("input_values", batch, 12, 8)),
        (transformers.PatchTSTForPrediction, series, ("past_values", batch, 16, 2)),
        (transformers.CLIPForImageClassification, both, ("pixel_values", batch, 3, 16, 16)),
    ]
    for made, config, (first, *shape) in nets:
        with quiet_libraries():
            network = made(config)
        assert usual_inputs(network) == (TensorSpec(first, tuple(shape), dtype),)
        assert not encoder_path(network)


def test_a_second_text_of_another_name_is_pointed_out(tmp_path: Path) -> None:
    path = encoder(tmp_path, CLASSES, roberta(num_labels=3))
    data = lines(tmp_path, text="a", title="a").data
    spec = tmp_path / "spec.yaml"
    result = CliRunner().invoke(
        application, ["init", str(path), "-o", str(spec), "--data", str(data)]
    )
    note = f"{spec}: # text-pair: title # CHECK: set it if the model reads pairs\n"
    assert result.stderr.startswith(note)
    assert result.stderr.count("CHECK") == 1
