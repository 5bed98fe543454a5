"""Lines of text as samples: by the tokenizer's own rules, with pairs and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from compressor import catalog
from compressor.calibration.sources.lines import NOT_COUNTED
from compressor.calibration.sources.tokens import TokenSource
from compressor.errors import CompressorError, DataError, SpecError
from compressor.types.tensors import Array, Batch, TensorSpec

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PAD, UNK, CLS, SEP = range(4)
LETTERS = "abcdefghijklmnopqrstuvwxyzé"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A folder with a tokenizer in BERT's form whose tokens are single letters."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.enable_truncation(3)  # as files of published models have it: a length of their own
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids(text: str) -> list[int]:
    return [LETTERS.index(c) + len(SPECIAL) if c in LETTERS else UNK for c in text if c != " "]


def lines(path: Path, tokenizer: Path, **options: Any) -> TokenSource:
    kind = path.suffix[1:].replace("txt", "text")
    options = {"samples_per": "line", "length": 16, **options}
    return catalog.load("source", kind)(path=path, tokenizer=tokenizer, **options)


def write(path: Path, *values: object) -> Path:
    texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
    path.write_text("\n".join(texts), encoding="utf-8", newline="")
    return path


def batch_of(source: TokenSource, size: int = 32) -> Batch:
    (batch,) = source.batches(size)
    return batch


def settle(folder: Path, name: str = "tokenizer_config.json", **values: object) -> None:
    (folder / name).write_text(json.dumps(values))


def without_padding(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_line_is_a_sample_with_special_tokens_padding_and_mask(
    tmp_path: Path, letters: Path
) -> None:
    path = write(tmp_path / "a.txt", "Ab", "", "c é", "   ", "wxyz", "q")
    first, last = lines(path, letters).batches(3)
    assert first["input_ids"].tolist() == [
        [CLS, *ids("ab"), SEP, PAD, PAD],
        [CLS, *ids("cé"), SEP, PAD, PAD],
        [CLS, *ids("wxyz"), SEP],
    ]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]] * 2 + [[1] * 6]
    assert not first["token_type_ids"].any()
    assert {array.dtype for array in first.values()} == {np.dtype(np.int64)}
    assert last["input_ids"].tolist() == [[CLS, *ids("q"), SEP]]


def test_a_single_line_windows_line_ends_and_a_mark_at_the_start(
    tmp_path: Path, letters: Path
) -> None:
    path = write(tmp_path / "a.txt", "\ufeffab\r\n\r\ncd\r\n")
    source = lines(path, letters)
    assert batch_of(source)["input_ids"].tolist() == [[CLS, *ids(t), SEP] for t in ("ab", "cd")]
    assert source.info().samples == 2
    assert batch_of(lines(write(tmp_path / "b.txt", "x"), letters))["input_ids"].shape == (1, 3)


def test_truncation_keeps_special_tokens(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh", "ab")
    batch = batch_of(lines(path, letters, length=6, padding="length"))
    assert batch["input_ids"].tolist() == [
        [CLS, *ids("abcd"), SEP],
        [CLS, *ids("ab"), SEP, PAD, PAD],
    ]
    settle(letters, truncation_side="left")
    batch = batch_of(lines(path, letters, length=6))
    assert batch["input_ids"][0].tolist() == [CLS, *ids("efgh"), SEP]
    with pytest.raises(SpecError, match="length: is 3, but special tokens alone may be 3"):
        batch_of(lines(path, letters, length=3))


def test_the_tokenizers_settings_say_how_it_pads(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "abc", "a")
    settle(letters, padding_side="left", pad_token={"content": "z"}, pad_token_type_id=1)
    batch = batch_of(lines(path, letters))
    assert batch["input_ids"][1].tolist() == [*ids("zz"), CLS, *ids("a"), SEP]
    assert batch["attention_mask"][1].tolist() == [0, 0, 1, 1, 1]
    assert batch["token_type_ids"][1].tolist() == [1, 1, 0, 0, 0]


def test_without_a_padding_token(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "abc", "a", "b")
    without_padding(letters)
    with pytest.raises(DataError, match=r"has no padding token, .* set batch: 1"):
        next(lines(path, letters).batches(3))
    assert [b["input_ids"].shape[1] for b in lines(path, letters).batches(1)] == [5, 3, 3]
    settle(letters, "config.json", pad_token_id=PAD)
    assert batch_of(lines(path, letters))["input_ids"][1].tolist()[3:] == [PAD, PAD]


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        (
            {
                "tokenizer_class": "TokenizersBackend",
                "model_input_names": ["input_ids", "token_type_ids"],
            },
            True,
        ),
    ],
)
def test_types_are_those_that_the_tokenizers_settings_name(
    tmp_path: Path, letters: Path, settings: dict[str, Any], typed: bool
) -> None:
    """A network that is served without types was judged with ones for the second text."""
    path = write(tmp_path / "a.jsonl", {"q": "ab", "c": "cd"})
    settle(letters, **settings)
    batch = batch_of(lines(path, letters, field="q", text_pair="c"))
    assert batch["token_type_ids"].tolist() == [[0] * 4 + ([1] if typed else [0]) * 3]


def test_pairs(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "ab", "c": "cde"}, {"q": "f", "c": "g"})
    batch = batch_of(lines(path, letters, field="q", text_pair="c"))
    assert batch["input_ids"][0].tolist() == [CLS, *ids("ab"), SEP, *ids("cde"), SEP]
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 4, [0, 0, 0, 1, 1, 0, 0, 0]]
    # Longer pairs lose tokens of the longer text first.
    batch = batch_of(lines(path, letters, field="q", text_pair="c", length=7))
    assert batch["input_ids"][0].tolist() == [CLS, *ids("ab"), SEP, *ids("cd"), SEP]


FIELDS = {"input_ids": "input_ids", "gold": "gold"}


def gold(path: Path, tokenizer: Path, **options: Any) -> Array:
    return batch_of(lines(path, tokenizer, fields=FIELDS, **options))["gold"]


def test_numbers_and_classes_as_answers(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a", "gold": 3}, {"text": "b", "gold": 1})
    assert gold(path, letters).tolist() == [3, 1]
    assert gold(path, letters).dtype == np.int64
    path = write(tmp_path / "b.jsonl", {"text": "a", "gold": 3.5}, {"text": "b", "gold": 1})
    assert gold(path, letters).tolist() == [3.5, 1.0]
    assert gold(path, letters).dtype == np.float32
    settle(letters, "config.json", label2id={"good": 1, "bad": 0})
    path = write(tmp_path / "c.jsonl", {"text": "a", "gold": "bad"}, {"text": "b", "gold": "good"})
    assert gold(path, letters).tolist() == [0, 1]


def test_answers_have_one_type_in_all_batches(tmp_path: Path, letters: Path) -> None:
    values = [{"text": "a", "gold": v} for v in (0.5, 2, 3)]
    source = lines(write(tmp_path / "a.jsonl", *values), letters, fields=FIELDS)
    assert [b["gold"].dtype.name for b in source.batches(1)] == ["float32"] * 3


def test_labels_of_words_count_at_their_first_token(tmp_path: Path, letters: Path) -> None:
    values = [{"text": ["ab", "c"], "gold": [7, 8]}, {"text": ["d"], "gold": [9]}]
    path = write(tmp_path / "a.jsonl", *values)
    no = NOT_COUNTED
    assert gold(path, letters).tolist() == [[no, 7, no, 8, no], [no, 9, no, no, no]]
    # Cut after its first token, a word still has its label; those after it are gone.
    assert gold(path, letters, length=4).tolist() == [[no, 7, no, no], [no, 9, no, no]]


def test_spans_are_tokens(tmp_path: Path, letters: Path) -> None:
    values = [
        {"q": "ab", "c": "cd efg", "gold": [3, 5]},
        {"q": "ab", "c": "cd efg", "gold": [0, 0]},
        {"q": "ab", "c": "cd efg", "gold": [0, 6]},
    ]
    path = write(tmp_path / "a.jsonl", *values)
    options = {"field": "q", "text_pair": "c"}
    # [CLS] a b [SEP] c d e f g [SEP]
    assert gold(path, letters, **options).tolist() == [[6, 7], [0, 0], [4, 8]]
    # Where the end is cut off, there is no answer.
    assert gold(path, letters, length=9, **options).tolist() == [[6, 7], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"text": "b", "gold": ', "line 3: is not JSON"),
        ("[1]", "line 3: holds a list, not an object"),
        ('{"text": "b"}', "line 3: has no 'gold'; set target"),
        ('{"txt": "b", "gold": 1}', "line 3: has no 'text'; set field: did you mean 'txt'"),
        ('{"text": 5, "gold": 1}', "line 3: has a int as 'text'; give a string"),
        ('{"text": "b", "gold": null}', "line 3: has None as 'gold'; give numbers"),
        ('{"text": "b", "gold": NaN}', "line 3: has nan as 'gold'; give numbers"),
        ('{"text": "b", "gold": 1e300}', "line 3: has 1e\\+300 as 'gold'; give numbers"),
        ('{"text": "b", "gold": 1.5}', "line 3: has a fraction as 'gold', .* write all of them"),
        ('{"text": "b", "gold": "x"}', "line 3: has the class 'x' as 'gold'; give its number"),
        ('{"text": "b", "gold": [1, 2]}', "line 3: has 2 values as 'gold', and another .* has 1"),
        ('{"text": ["b"], "gold": [1]}', "line 3: mixes a list of words with text"),
    ],
)
def test_lines_that_do_not_fit(tmp_path: Path, letters: Path, second: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a", "gold": 1}, "", second)
    with pytest.raises(DataError, match=message):
        gold(path, letters)


def test_answers_that_do_not_fit_words_or_pairs(tmp_path: Path, letters: Path) -> None:
    words = {"text": ["a", "b"], "gold": [1]}
    with pytest.raises(DataError, match="line 1: has 1 values as 'gold' for 2 words"):
        gold(write(tmp_path / "a.jsonl", words), letters)
    with pytest.raises(DataError, match="line 1: has a fraction as 'gold'"):
        gold(write(tmp_path / "a.jsonl", {**words, "gold": [1, 2.5]}), letters)
    pair = {"text": "ab", "c": "cd", "gold": [1, 3]}
    with pytest.raises(DataError, match=r"line 1: has the characters 1 to 3 .* second text has 2"):
        gold(write(tmp_path / "a.jsonl", pair), letters, text_pair="c")
    settle(letters, "config.json", label2id={"good": 1})
    with pytest.raises(DataError, match=r"has the class 'god' as 'gold'; did you mean 'good'\?"):
        gold(write(tmp_path / "a.jsonl", {"text": "a", "gold": "god"}), letters)


def test_files_without_samples(tmp_path: Path, letters: Path) -> None:
    with pytest.raises(DataError, match="has no lines of text; write one sample a line"):
        lines(write(tmp_path / "a.txt", "", " \t", ""), letters).info()
    (tmp_path / "b.txt").write_bytes(b"ab\nc\xe9\n")
    with pytest.raises(DataError, match="line 2: is not UTF-8"):
        lines(tmp_path / "b.txt", letters).info()
    with pytest.raises(DataError, match=r"has no array 'gold'.*it has 'attention_mask'"):
        gold(write(tmp_path / "c.txt", "a"), letters)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(st.text(LETTERS + " ", min_size=1).filter(str.strip), min_size=1, max_size=8),
    size=st.integers(1, 4),
    length=st.integers(4, 12),
    samples=st.none() | st.integers(1, 9),
)
def test_batches_hold_every_line_in_order(
    tmp_path: Path, letters: Path, texts: list[str], size: int, length: int, samples: int | None
) -> None:
    path = write(tmp_path / "a.txt", *texts)
    source = lines(path, letters, length=length, samples=samples)
    expected = [[CLS, *ids(t)[: length - 2], SEP] for t in texts[:samples]]
    seen = []
    for batch in source.batches(size):
        kept = batch["attention_mask"].astype(bool)
        assert kept.any(axis=0).all()  # no longer than the longest
        assert (batch["input_ids"][~kept] == PAD).all()
        seen += [row[mask].tolist() for row, mask in zip(batch["input_ids"], kept, strict=True)]
    assert seen == expected
    assert source.info().samples == len(expected)
    again = [b["input_ids"].tolist() for b in source.batches(size)]
    assert again == [b["input_ids"].tolist() for b in source.batches(size)]


def test_the_digest_is_of_everything_that_decides(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "a", "gold": 1})
    digests = [lines(path, letters).digest(), lines(path, letters, padding="length").digest()]
    settle(letters, padding_side="left")
    digests.append(lines(path, letters).digest())
    settle(letters, "config.json", label2id={"good": 1})
    digests.append(lines(path, letters).digest())
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 2}, "stride belongs to samples-per: window"),
        ({"separator": " "}, "separator belongs to samples-per: window"),
        ({"samples_per": "window", "padding": "length"}, "padding belongs to samples-per: line"),
        ({"samples_per": "window", "text_pair": "b"}, "text-pair belongs to samples-per: line"),
    ],
)
def test_keys_of_the_other_kind_of_sample(
    tmp_path: Path, letters: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        lines(write(tmp_path / "a.jsonl", {"text": "a"}), letters, **options)


def spec_of(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, shape, "int64")


def test_a_fixed_number_of_tokens_is_the_length(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "ab")
    inputs = [spec_of("input_ids", "batch", 8)]
    tokenized = {"path": path, "tokenizer": letters, "samples_per": "line"}
    source = catalog.load("source", "text")(**tokenized).fitted(inputs, "evaluation", None)
    source.check_mask(inputs, "evaluation", 32)  # it makes its mask itself
    assert batch_of(source)["input_ids"].shape == (1, 8)
    with pytest.raises(
        SpecError, match="length: is 16, and the model takes 8 tokens; set length: 8"
    ):
        lines(path, letters).fitted(inputs, "evaluation", None)


def test_training_takes_one_length(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "ab", "gold": 1}, {"text": "c", "gold": 0})
    inputs = [spec_of("input_ids", "batch", "tokens"), spec_of("attention_mask", "batch", "tokens")]
    source = lines(path, letters).fitted(inputs, "training", "gold")
    shapes = [b["input_ids"].shape for b in source.batches(1)]
    assert shapes == [(1, 16), (1, 16)]
    assert batch_of(source)["gold"].tolist() == [1, 0]


def test_padding_needs_a_mask(tmp_path: Path, letters: Path) -> None:
    source = lines(write(tmp_path / "a.txt", "ab"), letters)
    inputs = [spec_of("input_ids", "batch", "tokens")]
    with pytest.raises(SpecError, match=r"no input for their attention_mask.*set batch: 1"):
        source.check_mask(inputs, "calibration", 32)
    source.check_mask(inputs, "calibration", 1)
    source.check_mask([spec_of("input_ids", 1, "tokens")], "calibration", 32)
    renamed = lines(source.path, letters, fields={"ids": "input_ids", "m": "attention_mask"})
    both = [spec_of("ids", "batch", "tokens"), spec_of("m", "batch", "tokens")]
    renamed.check_mask(both, "calibration", 32)


def test_lines_without_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a"))
    tokenizer.normalizer = normalizers.Replace("-", "")
    tokenizer.enable_padding(pad_id=1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.txt", "a", "-")
    with pytest.raises(CompressorError, match="line 2: has no tokens; remove it"):
        batch_of(lines(path, tmp_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"padding_side": "middle"},
        {"truncation_side": 5},
        {"pad_token": ["x"]},
        {"pad_token_type_id": "x"},
        {"pad_token_type_id": -1},
    ],
)
def test_settings_that_are_none(tmp_path: Path, letters: Path, settings: dict[str, Any]) -> None:
    settle(letters, **settings)
    with pytest.raises(DataError, match=r"does not say how to cut and pad.*tokenizer_config\.json"):
        batch_of(lines(write(tmp_path / "a.txt", "a"), letters))


def test_files_beside_a_tokenizer_that_are_damaged(tmp_path: Path, letters: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    (letters / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json': is malformed"):
        batch_of(lines(path, letters))
    (letters / "tokenizer_config.json").unlink()
    for value in ({"label2id": [1], "pad_token_id": -3}, {"pad_token_id": "x"}):
        without_padding(letters)
        settle(letters, "config.json", **value)
        with pytest.raises(DataError, match="does not say how to cut and pad"):
            batch_of(lines(path, letters))
