"""Tokenizers as llama.cpp has them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models

from compressor.errors import ModelError, SpecError
from compressor.exporters.gguf.vocabulary import read_vocabulary
from tests.compressor.exporters.gguf.folders import over_bytes, sentence_piece
from tests.paths import ROOT

pytest.importorskip("gguf", reason="gguf is not installed")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
CUTS = [(None, "gpt-2"), (LLAMA3, "llama-bpe"), (QWEN, "qwen2")]


def saved(folder: Path, tokenizer: Tokenizer, **options: str) -> Path:
    special = {"bos_token": "<s>", "eos_token": "</s>", **options}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("pattern", "cut"), CUTS)
def test_encoding_over_bytes(pattern: str | None, cut: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, over_bytes(pattern), chat_template="{{ messages }}")
    found = read_vocabulary(folder, 300)
    assert (found.model, found.cut) == ("gpt2", cut)
    assert found.merges == ("Ġ t", "h e", "Ġt he")
    assert found.tokens[:2] == ("<s>", "</s>")
    assert found.types[:3] == (3, 3, 1)  # control, control, normal
    assert found.tokens[261:] == tuple(f"[PAD{i}]" for i in range(261, 300))
    assert set(found.types[261:]) == {5}  # unused
    assert dict(found.special) == {"bos": 0, "eos": 1}
    assert found.added["bos"]
    assert found.template == "{{ messages }}"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece(prefix: bool, tmp_path: Path) -> None:
    found = read_vocabulary(saved(tmp_path, sentence_piece(prefix=prefix)), 266)
    assert (found.model, found.space_prefix) == ("llama", prefix)
    assert not found.merges
    score = dict(zip(found.tokens, found.scores, strict=True))
    # Merges that come first score highest.
    assert 0 > score["he"] > score["▁t"] > score["▁the"]
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x0A>"], kinds["he"]) == (2, 3, 6, 1)


def test_single_characters_become_bytes() -> None:
    found = read_vocabulary(ROOT / "samples" / "tiny-llama" / "checkpoint", 66)
    assert found.model == "gpt2"
    assert found.tokens[:4] == ("Ċ", "Ġ", "!", "$")
    assert len(found.merges) == 1  # llama.cpp wants one; it merges to no token
    assert found.merges[0].replace(" ", "") not in found.tokens


def test_an_unknown_cut_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, over_bytes(r"\d+|\D+"))
    with pytest.raises(SpecError, match=r"cuts text by pattern '\\\\d\+\|\\\\D\+'"):
        read_vocabulary(folder, 300)
    assert read_vocabulary(folder, 300, "default").cut == "default"


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0)], 0)))
    with pytest.raises(SpecError, match="of the kind 'Unigram'"):
        read_vocabulary(folder, 10)


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, over_bytes())
    with pytest.raises(ModelError, match="has a token of number 260, the model has 200"):
        read_vocabulary(folder, 200)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no tokenizer\.json"):
        read_vocabulary(tmp_path, 10)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("model"),
        lambda content: content["model"].update(vocab=[1, 2]),
        lambda content: content["model"].update(merges=[["a"]]),
        lambda content: content.update(added_tokens=[{"id": 3}]),
        lambda content: content.update(pre_tokenizer={"a": 1}),
        lambda content: content.update(post_processor={"processors": 3}),
    ],
)
def test_a_malformed_tokenizer_is_an_error(damage, tmp_path: Path) -> None:
    folder = saved(tmp_path, over_bytes())
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="is malformed"):
        read_vocabulary(folder, 300)


def test_text_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    shutil.copy(__file__, tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="cannot be read"):
        read_vocabulary(tmp_path, 300)
