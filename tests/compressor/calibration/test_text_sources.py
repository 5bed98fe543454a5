"""Sources of tokenized text: windows over one stream, counted and read in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from compressor import catalog
from compressor.calibration.sources import tokens as token_source
from compressor.calibration.sources.tokens import PIECE, TokenSource
from compressor.errors import DataError, ExitCode, SpecError
from compressor.spec.load import load_spec
from compressor.types.tensors import Array, TensorSpec

LETTERS = "\nabcdefghijklmnopqrstuvwxyz é"


@pytest.fixture
def characters(tmp_path: Path) -> Path:
    """A folder with a tokenizer of single characters: a letter's id is its place in LETTERS."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = {c: i for i, c in enumerate(LETTERS)} | {"?": len(LETTERS)}
    Tokenizer(models.BPE(vocabulary, [], unk_token="?")).save(str(folder / "tokenizer.json"))
    return folder


def source(kind: str, path: Path, tokenizer: Path, **options: object) -> TokenSource:
    return catalog.load("source", kind)(path=path, tokenizer=tokenizer, **options)


def ids(text: str) -> list[int]:
    return [LETTERS.index(c) for c in text]


def read(data: TokenSource, name: str, size: int = 3) -> Array:
    return np.concatenate([batch[name] for batch in data.batches(size)])


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_samples_and_what_follows_them(tmp_path: Path, characters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefghijkl")
    data = source("text", path, characters, length=4)
    # The last token of the second window is only a label; "jkl" fills no third one.
    assert read(data, "input_ids").tolist() == [ids("abcd"), ids("efgh")]
    assert read(data, "labels").tolist() == [ids("bcde"), ids("fghi")]
    assert read(data, "attention_mask").tolist() == [[1] * 4] * 2
    info = data.info()
    assert info.samples == 2
    assert TensorSpec("labels", ("batch", 4), "int64") in info.fields
    batch = next(data.batches(2))
    assert batch["input_ids"].dtype == batch["labels"].dtype == np.int64
    batch["input_ids"][:] = 0  # batches are the caller's
    assert next(data.batches(2))["input_ids"].any()


def test_stride_samples_limit_and_fields(tmp_path: Path, characters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefghijkl")
    near = source("text", path, characters, length=4, stride=2)
    assert read(near, "input_ids").tolist() == [ids(w) for w in ("abcd", "cdef", "efgh", "ghij")]
    far = source("text", path, characters, length=2, stride=5)
    assert read(far, "input_ids").tolist() == [ids("ab"), ids("fg")]
    fields = {"tokens": "input_ids", "labels": "labels"}
    few = source("text", path, characters, length=2, samples=3, fields=fields)
    assert few.info().samples == 3
    assert [f.name for f in few.info().fields] == ["tokens", "labels"]
    assert [len(b["tokens"]) for b in few.batches(2)] == [2, 1]
    assert [len(b["tokens"]) for b in few.batches(2, limit=1)] == [1]
    assert list(few.batches(2, limit=0)) == []
    assert source("text", path, characters, length=2, samples=99).info().samples == 5
    with pytest.raises(ValueError, match="batches of 0"):
        next(few.batches(0))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(LETTERS, min_size=2, max_size=60),
    length=st.integers(1, 12),
    stride=st.integers(1, 15),
    size=st.integers(1, 4),
)
def test_windows_are_those_of_the_whole_text(
    tmp_path: Path, characters: Path, text: str, length: int, stride: int, size: int
) -> None:
    path = write(tmp_path / "a.txt", text)
    data = source("text", path, characters, length=length, stride=stride)
    tokens = ids(text)
    starts = range(0, len(tokens) - length, stride)
    if not starts:
        with pytest.raises(DataError, match=f"has {len(tokens)} tokens, but a sample needs"):
            data.info()
        return
    assert data.info().samples == len(starts)
    assert read(data, "input_ids", size).tolist() == [tokens[s : s + length] for s in starts]
    assert read(data, "labels", size).tolist() == [tokens[s + 1 : s + length + 1] for s in starts]


@pytest.mark.parametrize("line", [7, 100, 2 * PIECE + 5])
def test_pieces_do_not_show(tmp_path: Path, characters: Path, line: int) -> None:
    # Two bytes a letter, so that pieces also end within one.
    rng = np.random.default_rng(0)
    letters = rng.choice(list("abé"), 5 * PIECE)
    letters[::line] = "\n"
    text = "".join(letters)
    data = source("text", write(tmp_path / "a.txt", text), characters, length=100)
    tokens = read(data, "input_ids").reshape(-1)
    assert tokens.tolist() == ids(text)[: len(tokens)]
    assert len(text) - len(tokens) <= 100


def test_documents_are_joined_in_order(tmp_path: Path, characters: Path) -> None:
    lines = [{"text": "abc", "id": 1}, {"text": ""}, {"text": "def"}]
    text = "\n".join(json.dumps(line) for line in lines[:2]) + "\n\n" + json.dumps(lines[2])
    path = write(tmp_path / "a.jsonl", text)
    joined = source("jsonl", path, characters, length=1, separator=" ")
    assert "".join(LETTERS[i] for i in read(joined, "input_ids").reshape(-1)) == "abc de"


def test_a_folder_is_all_its_files(tmp_path: Path, characters: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "b.txt", "def")
    write(folder / "a.txt", "\ufeffabc")
    write(folder / "c.md", "no")
    data = source("text", folder, characters, length=1, separator="")
    assert read(data, "input_ids").reshape(-1).tolist() == ids("abcde")
    write(folder / "a.jsonl", json.dumps({"body": "xyz"}))
    data = source("jsonl", folder, characters, length=1, field="body")
    assert read(data, "input_ids").reshape(-1).tolist() == ids("xy")


def test_the_digest_is_of_content_and_options(tmp_path: Path, characters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdef")
    digest = source("text", path, characters, length=2).digest()
    moved = tmp_path / "moved"
    moved.mkdir()
    copy = write(moved / "b.txt", "abcdef")
    tokenizer = moved / "other.json"
    tokenizer.write_bytes((characters / "tokenizer.json").read_bytes())
    assert source("text", copy, tokenizer, length=2).digest() == digest
    different = [
        source("text", copy, tokenizer, length=3),
        source("text", copy, tokenizer, length=2, stride=1),
        source("text", copy, tokenizer, length=2, samples=1),
        source("text", write(moved / "c.txt", "abcdeg"), tokenizer, length=2),
    ]
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    different.append(source("text", copy, tokenizer, length=2))
    assert len({digest, *(d.digest() for d in different)}) == 6


def test_truncation_and_padding_of_the_tokenizer_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.txt", "a b " * 10)
    data = source("text", path, tmp_path / "tokenizer.json", length=19)
    assert read(data, "labels").tolist() == [[1, 0] * 9 + [1]]


def test_large_files_are_not_counted_ahead(
    tmp_path: Path, characters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.txt", "ab" * 50)
    monkeypatch.setattr(token_source, "_COUNTED", 99)
    assert source("text", path, characters, length=2).info().samples is None
    assert source("text", path, characters, length=2, samples=3).info().samples == 3
    with pytest.raises(DataError, match="has 100 tokens, but a sample needs 101"):
        source("text", path, characters, length=100).info()


def test_memory_does_not_grow_with_the_text(tmp_path: Path, characters: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from compressor.calibration.sources.tokens import TextSource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def run(path):
    data = TextSource(path=Path(path), tokenizer=Path(sys.argv[1]), length=256)
    assert data.info().samples > 100
    for batch in data.batches(32):
        pass
    return peak()
small, large = run(sys.argv[2]), run(sys.argv[3])
print(large - small)
"""
    small = write(tmp_path / "small.txt", ("abc def\n" * 64) * 1024)  # 512 kB
    large = write(tmp_path / "large.txt", ("abc def\n" * 64) * 1024 * 12)  # 6 MB
    command = [sys.executable, "-c", program, str(characters), str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Its ids alone, int64, would be 50 MB.
    assert int(done.stdout) < 12_000  # kB


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "ab"}\n{"text": \n', "line 2: is not JSON"),
        (b'{"text": "ab"}\n\n[1]\n', "line 3: holds a list, not an object"),
        (b'{"texts": "ab"}\n', r"line 1: has no 'text'; set field: did you mean 'texts'\?"),
        (b'{"text": 5}\n', "line 1: has a int as 'text'; give a string"),
        (b'{"text": "\xff"}\n', "line 1: is not UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1: is not JSON"),
        (b"", "has 0 tokens, but a sample needs 5"),
        (b'{"text": "abcd"}', "has 4 tokens, but a sample needs 5.*; take a length of 3 at most"),
    ],
    ids=["cut", "list", "field", "number", "latin", "deep", "empty", "short"],
)
def test_lines_that_are_no_documents(
    tmp_path: Path, characters: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        source("jsonl", path, characters, length=4).info()
    assert caught.value.exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("place", [3, PIECE + 2000])
def test_text_that_is_not_utf8(tmp_path: Path, characters: Path, place: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * place + b"\xe9 la carte" * 5)
    with pytest.raises(DataError, match=f"not UTF-8: byte 0xe9 at about byte {place:,}"):
        source("text", path, characters, length=4).info()
    path.write_bytes(b"abcdefgh\xc3")  # cut within a letter
    with pytest.raises(DataError, match="not UTF-8"):
        source("text", path, characters, length=4).info()


def test_paths_that_lead_nowhere(tmp_path: Path, characters: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh")
    with pytest.raises(SpecError, match=r"gone\.txt': does not exist"):
        source("text", tmp_path / "gone.txt", characters).info()
    with pytest.raises(DataError, match=r"holds no \.txt file"):
        source("text", characters, characters).info()
    with pytest.raises(SpecError, match=r"tokenizer '.*gone': does not exist"):
        source("text", path, tmp_path / "gone").info()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"empty': holds no tokenizer\.json; save it in that form"):
        source("text", path, tmp_path / "empty").info()
    with pytest.raises(DataError, match=r"has no array 'label'.*did you mean 'labels'"):
        source("text", path, characters, fields={"label": "label"}).info()


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"version": "1.0"}', b"\xff\xfe", b"["])
def test_tokenizers_that_are_none(tmp_path: Path, characters: Path, content: bytes) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json': cannot be read"):
        source("text", path, tmp_path, length=4).info()


def test_without_the_package(
    tmp_path: Path, characters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SpecError, match=r'run pip install "compressor\[transformers\]"'):
        source("text", write(tmp_path / "a.txt", "abc"), characters).info()


def test_paths_in_a_spec_are_relative_to_it(
    tmp_path: Path, characters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.txt", "abcdefgh")
    spec = tmp_path / "spec.yaml"
    lines = [
        "version: 1",
        "name: text",
        "model: {onnx: m.onnx}",
        "data:",
        "  evaluation: {text: a.txt, tokenizer: $TOKENS/tokenizer, length: 3, target: labels,",
        "    inputs: {input_ids: input_ids}}",
        "exports: [{format: onnx}]",
    ]
    spec.write_text("\n".join(lines))
    monkeypatch.setenv("TOKENS", ".")
    options = load_spec(spec).data["evaluation"].options
    assert isinstance(options, TokenSource)
    assert options.tokenizer == characters
    assert options.fields == {"input_ids": "input_ids", "labels": "labels"}
    assert next(options.batches(1))["labels"].tolist() == [ids("bcd")]
    monkeypatch.delenv("TOKENS")
    with pytest.raises(SpecError, match=r"spec\.yaml:5: data\.evaluation\.tokenizer: uses the env"):
        load_spec(spec)


def test_a_tokenizer_without_the_token_for_what_it_does_not_know(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b " * 20 + "c")
    with pytest.raises(DataError, match=r"cannot encode the text .*vocabulary is not complete"):
        source("text", tmp_path / "text.txt", tmp_path, length=4).info()


def test_a_tokenizer_that_would_leave_a_character_out(tmp_path: Path) -> None:
    """Without a token for what it does not know, it says nothing: the text would be another."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "aa": 2}, [("a", "a")]))
    path = write(tmp_path / "a.txt", "abaa aab\u0301 " * 4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer: has no token for '.', nor one for unk"):
        read(source("text", path, tmp_path / "tokenizer.json", length=3), "input_ids")
    tokenizer.normalizer = normalizers.StripAccents()  # on purpose
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = read(source("text", path, tmp_path / "tokenizer.json", length=4), "input_ids")
    assert found[0].tolist() == [0, 1, 2, 2]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    levels = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    levels.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    levels.save(str(tmp_path / "tokenizer.json"))
    found = read(source("text", path, tmp_path / "tokenizer.json", length=4), "input_ids")
    assert found.shape[1] == 4
