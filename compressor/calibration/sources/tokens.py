"""Text files and JSON Lines, tokenized and cut into windows."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field

from compressor.calibration.sources.file_source import Header, PathSource, choose, describe
from compressor.errors import DataError, SpecError, suggestion
from compressor.types.data import SourceInfo
from compressor.types.tensors import Array, Batch

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Tokens: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
PIECE = 1 << 15
"""Characters that are tokenized at a time."""
_TOGETHER = 8 * PIECE  # characters for one call, in which the library works in parallel
_MOST = 1024  # pieces for one call
_NAME = "tokenizer.json"


def tokenizer_file(path: Path) -> Path:
    """Return the ``tokenizer.json`` that a path means.

    Raises:
        SpecError: the path does not exist, or is a folder without that file.
    """
    if path.is_file():
        return path
    subject = f"tokenizer '{path}'"
    if not path.exists():
        raise SpecError(subject, "does not exist", "correct the path")
    if not (path / _NAME).is_file():
        raise SpecError(
            subject,
            f"holds no {_NAME}",
            "save it in that form: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    return path / _NAME


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer; truncation and padding that it may be set to are switched off.

    Raises:
        SpecError: it does not exist, or the package ``tokenizers`` is not installed.
        DataError: it is malformed.
    """
    file = tokenizer_file(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SpecError(
            f"tokenizer '{path}'",
            "needs the package tokenizers, which is not installed",
            'run pip install "compressor[transformers]"',
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises nothing narrower.
    except Exception as error:
        raise DataError(
            f"tokenizer '{file}'",
            f"cannot be read ({str(error).partition(chr(10))[0][:200]})",
            "save it again with a version of tokenizers that is not newer than this one's",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_stream(tokenizer: Tokenizer, pieces: Iterable[str]) -> Iterator[Tokens]:
    """Yield the tokens of each piece of text, int64 ``[n]``, without special ones."""
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _TOGETHER or len(waiting) >= _MOST:
            yield from _encoded(tokenizer, waiting)
            waiting, size = [], 0
    yield from _encoded(tokenizer, waiting)


def _encoded(tokenizer: Tokenizer, pieces: list[str]) -> Iterator[Tokens]:
    try:
        encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    # The library raises nothing narrower.
    except Exception as error:
        raise DataError(
            "tokenizer",
            f"cannot encode the text ({str(error).partition(chr(10))[0][:200]})",
            "save it again; its vocabulary is not complete",
        ) from error
    for encoding in encodings:
        yield np.array(encoding.ids, np.int64)


_COUNTED = 64 << 20  # bytes of text that are tokenized to learn how many samples there are
_IDS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"


class TokenSource(PathSource, ABC):
    """Samples of ``length`` tokens from text, as a language model is trained and judged on.

    The arrays are int64 ``[samples, length]``: ``input_ids``; ``labels``, the same tokens moved
    on by one, so that ``labels[i]`` is what follows ``input_ids[i]``; and ``attention_mask``, all
    ones, for models that ask for it. All documents make one stream of tokens, which is cut into
    windows; tokens at the end that fill no window are left out. Memory does not grow with the
    files, which are tokenized in pieces that end at line ends. How many samples files of more than
    64 MiB hold is not known before they are read.
    """

    suffix: ClassVar[str]

    path: Path = Field(strict=False, description="the file, or a folder of such files")
    tokenizer: Path = Field(
        strict=False,
        description="tokenizer.json, or the folder that holds it; read without network",
    )
    length: int = Field(
        default=512,
        ge=1,
        description="tokens in a sample; `target: labels` names the tokens that follow them, "
        "which metric perplexity needs",
    )
    stride: int | None = Field(
        default=None, ge=1, description="tokens from one sample's start to the next; default length"
    )
    separator: str = Field(default="\n\n", description="text that is put between two documents")

    @abstractmethod
    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the documents of one file, each as an iterator over pieces of its text.

        Raises:
            DataError: the content is not what it should be.
        """

    def info(self) -> SourceInfo:
        """Describe the samples; files of up to 64 MiB are tokenized once, to count them.

        Raises:
            SpecError: a file does not exist, or the package ``tokenizers`` is not installed.
            DataError: a file is unusable, or the text is shorter than one sample.
        """
        headers = self._headers()
        arrays = choose(self.subject, self.fields, headers)
        return SourceInfo(self.count, describe(self.subject, arrays, headers, None).fields)

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit``; raises as ``info`` does."""
        if size < 1:
            raise ValueError(f"batches of {size} samples")
        limits = [most for most in (self.samples, limit) if most is not None]
        left = min(limits, default=None)
        arrays = choose(self.subject, self.fields, self._headers())
        if left is not None and left <= 0:
            return
        rows: list[Array] = []
        for window in self._windows(left):
            rows.append(window)
            if len(rows) == size:
                yield _batch(rows, arrays)
                rows = []
        if rows:
            yield _batch(rows, arrays)

    def digest(self) -> str:
        """Return a SHA-256 of the options, the tokenizer and the text, whatever their location."""
        with self._guard():
            files = (tokenizer_file(self.tokenizer), *self.files())
            return self.hashed({"path", "tokenizer"}, ((b"", path) for path in files))

    def files(self) -> list[Path]:
        """Return the file, or those of the folder with the usual suffix, sorted by name.

        Raises:
            SpecError: the path does not exist.
            DataError: the folder holds none.
        """
        if not self.path.exists():
            raise SpecError(self.subject, "does not exist", "correct the path")
        if not self.path.is_dir():
            return [self.path]
        files = sorted(path for path in self.path.glob(f"*{self.suffix}") if path.is_file())
        if not files:
            raise DataError(
                self.subject, f"holds no {self.suffix} file", f"name a {self.kind} itself"
            )
        return files

    @cached_property
    def count(self) -> int | None:
        """The number of samples; ``None`` if counting would take long."""
        with self._guard():
            size = sum(path.stat().st_size for path in self.files())
        if size > _COUNTED and self.samples is None:
            next(self._windows(1))
            return None
        return sum(1 for _ in self._windows(self.samples))

    def _headers(self) -> dict[str, Header]:
        header = Header((1, self.length), np.dtype(np.int64))
        return dict.fromkeys((_IDS, _LABELS, _MASK), header)

    def _windows(self, most: int | None) -> Iterator[Array]:
        """Yield int64 ``[length + 1]``, at least one, at most ``most``."""
        span, stride = self.length + 1, self.stride or self.length
        kept = np.empty(0, np.int64)
        skip = seen = made = 0
        with self._guard():
            for tokens in token_stream(open_tokenizer(self.tokenizer), self._pieces()):
                seen += len(tokens)
                kept = np.concatenate([kept, tokens])
                kept, skip = kept[skip:], max(0, skip - len(kept))
                while len(kept) >= span:
                    yield kept[:span]
                    made += 1
                    if made == most:
                        return
                    skip = max(0, stride - len(kept))
                    kept = kept[stride:]
        if not made:
            raise DataError(
                self.subject,
                f"has {seen} tokens, but a sample needs {span}: {self.length} and the next one",
                f"set length: {seen - 1}" if seen > 1 else "give a longer text",
            )

    def _pieces(self) -> Iterator[str]:
        """Yield the text of all files in pieces, the separator before each document but one."""
        before = ""
        for path in self.files():
            with path.open("rb") as stream:
                for document in self.documents(path, stream):
                    for piece in document:
                        yield before + piece
                        before = ""
                    before = self.separator

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                self.subject,
                f"cannot be read: {error.strerror or error}",
                f"check that it is a complete {self.kind}",
            ) from error


def _batch(rows: list[Array], names: dict[str, str]) -> Batch:
    windows = np.stack(rows)
    arrays = {
        _IDS: windows[:, :-1],
        _LABELS: windows[:, 1:],
        _MASK: np.ones((len(windows), windows.shape[1] - 1), np.int64),
    }
    return {name: np.array(arrays[stored], order="C") for name, stored in names.items()}


class TextSource(TokenSource):
    """Tokenized samples of a text file in UTF-8, or of all ``.txt`` files in a folder.

    Each file is one document.
    """

    kind: ClassVar[str] = "text file"
    suffix: ClassVar[str] = ".txt"

    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the file as one document."""
        yield _pieces(path, stream)


def _pieces(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Yield the text in pieces that end at a line's end, if lines are not very long.

    Raises:
        DataError: the bytes are not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = False
    position = 0
    while not done:
        part = stream.read(PIECE)
        if not part.endswith(b"\n"):
            part += stream.readline(PIECE)
        done = not part
        try:
            text = decoder.decode(part, final=done)
        except UnicodeDecodeError as error:
            place = position + error.start
            raise DataError(
                f"data '{path}'",
                f"is not UTF-8: byte 0x{error.object[error.start]:02x} at about byte {place:,}",
                "convert it, e.g. with iconv -t utf-8",
            ) from error
        position += len(part)
        if text:
            yield text


class JsonlSource(TokenSource):
    """Tokenized samples of a file with one JSON object a line, or of all ``.jsonl`` in a folder.

    Each object is one document: its text stands under ``field``. Empty lines are passed over.
    """

    kind: ClassVar[str] = "JSON Lines file"
    suffix: ClassVar[str] = ".jsonl"

    field: str = Field(default="text", description="key of the text in each object")

    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the text of each line's object."""
        for number, line in enumerate(stream, 1):
            if line.strip():
                text = self._text(f"data '{path}', line {number}", line)
                yield (text[start : start + PIECE] for start in range(0, len(text), PIECE))

    def _text(self, subject: str, line: bytes) -> str:
        try:
            value: Any = json.loads(line.decode("utf-8-sig"))
            if b"\\u" in line:  # half of a surrogate pair is no text
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            raise DataError(subject, f"is not UTF-8 ({error.reason})", "convert it") from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                subject, f"is not JSON ({error})", "write one JSON object a line"
            ) from error
        text = value.get(self.field) if isinstance(value, dict) else None
        if isinstance(text, str):
            return text
        if not isinstance(value, dict):
            kind, remedy = type(value).__name__, f'write it like {{"{self.field}": "..."}}'
            raise DataError(subject, f"holds a {kind}, not an object", remedy)
        if self.field not in value:
            remedy = f"set field: {suggestion(self.field, list(value))}"
            raise DataError(subject, f"has no {self.field!r}", remedy)
        kind = type(text).__name__
        raise DataError(subject, f"has a {kind} as {self.field!r}", "give a string")
