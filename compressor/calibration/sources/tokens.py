"""Text files and JSON Lines, tokenized: cut into windows, or line by line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from compressor.calibration.sources.documents import (
    field_of,
    objects,
    text_lines,
    text_of,
    text_or_words,
    text_pieces,
)
from compressor.calibration.sources.file_source import Header, PathSource, choose
from compressor.calibration.sources.lines import (
    LINE_ARRAYS,
    MASK,
    LineOptions,
    Record,
    line_batches,
    lines_cut,
    width_of,
)
from compressor.calibration.sources.tokenizer import (
    BESIDE,
    PIECE,
    Padding,
    open_tokenizer,
    token_stream,
    tokenizer_file,
)
from compressor.calibration.sources.windows import WINDOW_ARRAYS, Windows, window_batches
from compressor.errors import DataError, SpecError
from compressor.types.data import SourceInfo
from compressor.types.options import kebab
from compressor.types.tensors import Array, Batch, TensorSpec, fixed_batch

_COUNTED = 64 << 20  # bytes of text that are read to learn how many samples there are
_OF_WINDOWS = ("stride", "separator")
_OF_LINES = ("padding", "text_pair")


class TokenSource(PathSource, ABC):
    """Samples of tokens from text, in windows or line by line.

    In windows, as a language model is trained and judged on them, all documents make one stream of
    tokens without special ones, which is cut into samples of ``length``; tokens at the end that
    fill no window are left out. The arrays are int64 ``[samples, length]``: ``input_ids``;
    ``labels``, the same tokens moved on by one, so that ``labels[i]`` is what follows
    ``input_ids[i]``; and ``attention_mask``, all ones, for models that ask for it.

    With ``samples-per: line``, as an encoder reads text, each line is a sample: with special
    tokens, cut at ``length`` and padded by the tokenizer's own rules. The arrays are
    ``input_ids``, ``attention_mask`` and ``token_type_ids``, int64 ``[samples, tokens]``.

    Memory does not grow with the files. How many samples files of more than 64 MiB hold is not
    known before they are read.
    """

    suffix: ClassVar[str]

    path: Path = Field(strict=False, description="the file, or a folder of such files")
    tokenizer: Path = Field(
        strict=False,
        description="tokenizer.json, or the folder that holds it; read without network",
    )
    samples_per: Literal["window", "line"] = Field(
        default="window",
        description="window: all text as one stream, for causal language models; line: each line "
        "is a sample as an encoder reads it",
    )
    length: int = Field(
        default=512,
        ge=1,
        description="tokens in a sample, for lines at most; `target: labels` names the tokens that "
        "follow those of a window, which metric perplexity needs",
    )
    stride: int | None = Field(
        default=None, ge=1, description="tokens from one window's start to the next; default length"
    )
    separator: str = Field(
        default="\n\n", description="text inserted between two documents, for windows"
    )
    padding: Padding = Field(
        default="longest",
        description="how far lines are padded: to the longest of their batch, or to `length`, "
        "which training and models with a fixed number of tokens set themselves",
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        lines = self.samples_per == "line"
        wrong = self.model_fields_set.intersection(_OF_WINDOWS if lines else _OF_LINES)
        if wrong:
            other = "window" if lines else "line"
            raise ValueError(f"{kebab(min(wrong))} belongs to samples-per: {other}")
        return self

    @property
    def in_windows(self) -> bool:
        """Samples are cut out of one stream, which only a causal model reads like that."""
        return self.samples_per == "window"

    @abstractmethod
    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the documents of one file, each as an iterator over pieces of its text.

        Raises:
            DataError: the content is not what it should be.
        """

    @abstractmethod
    def records(self, path: Path, stream: IO[bytes]) -> Iterator[Record]:
        """Yield the lines of one file that are not empty; raises as :meth:`documents` does."""

    def fitted(self, inputs: Sequence[TensorSpec], role: str, target: str | None) -> TokenSource:
        """Return the source for a model: what its inputs fix about lines is set.

        Args:
            role: what the data are for; training takes all samples in one length.
            target: the array with the answers.

        Raises:
            SpecError: the model takes another number of tokens.
        """
        if self.in_windows:
            return self
        every = LINE_ARRAYS if target is None else (*LINE_ARRAYS, target)
        changes: dict[str, Any] = {"fields": self.fields or dict(zip(every, every, strict=True))}
        width = width_of(inputs, self.fields)
        if width is not None and "length" in self.model_fields_set and self.length != width:
            raise SpecError(
                f"data.{role}.length",
                f"is {self.length}, and the model takes {width} tokens",
                f"set length: {width}",
            )
        if width is not None or role == "training":
            changes |= {"padding": "length", "length": width or self.length}
        return self.model_copy(update=changes)

    def check_mask(self, inputs: Sequence[TensorSpec], role: str, batch: int) -> None:
        """Check that a model which is given padded lines can tell the padding.

        Raises:
            SpecError: it has no input for the mask.
        """
        names = [self.fields.get(spec.name, spec.name) for spec in inputs]
        padded = not self.in_windows and (fixed_batch(inputs) or batch) > 1
        if MASK in names or not padded or width_of(inputs, self.fields) is not None:
            return
        raise SpecError(
            f"{role} data",
            f"are padded lines, and the model has no input for their {MASK}, so that it would read "
            "the padding as text",
            f"add {MASK} to model.inputs and to the inputs of the data, or set batch: 1",
        )

    def info(self) -> SourceInfo:
        """Describe the samples; files of up to 64 MiB are read once, to count them.

        Raises:
            SpecError: a file does not exist, or the package ``tokenizers`` is not installed.
            DataError: a file is unusable, or the text is shorter than one sample.
        """
        names = self._names()
        if self.in_windows:
            fields = [TensorSpec(name, ("batch", self.length), "int64") for name in names]
        else:
            fields = [
                TensorSpec(name, ("batch", *(None for _ in array.shape[1:])), array.dtype.name)
                for name, array in next(self.batches(1, 1)).items()
            ]
        return SourceInfo(self.count, tuple(fields))

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit``; raises as ``info`` does."""
        if size < 1:
            raise ValueError(f"batches of {size} samples")
        limits = [most for most in (self.samples, limit) if most is not None]
        left = min(limits, default=None)
        names = self._names()
        if left is not None and left <= 0:
            return
        if not self.in_windows:
            options = LineOptions(self.tokenizer, self.length, self.padding, names)
            yield from line_batches(islice(self._lines(), left), options, size)
        else:
            yield from window_batches(islice(self._windows(), left), names, size)

    def cut(self, most: int) -> tuple[int, int]:
        """Return how many of the first ``most`` lines are longer than ``length``, and of how many.

        Raises as :meth:`info` does.
        """
        options = LineOptions(self.tokenizer, self.length, self.padding, self._names())
        lines = list(islice(self._lines(), min(most, self.samples or most)))
        return lines_cut(lines, options), len(lines)

    def digest(self) -> str:
        """Return a SHA-256 of the options, the tokenizer and the text, whatever their location."""
        with self._guard():
            file = tokenizer_file(self.tokenizer)
            # What belongs to lines alone does not change the digest of windows.
            hidden = {"samples_per", *_OF_LINES} if self.in_windows else set[str]()
            settings = [] if self.in_windows else [file.parent / name for name in BESIDE]
            files = (file, *(path for path in settings if path.is_file()), *self.files())
            return self.hashed({"path", "tokenizer", *hidden}, ((b"", path) for path in files))

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
        every = self._windows if self.in_windows else self._lines
        if size > _COUNTED and self.samples is None:
            next(iter(every()))
            return None
        return sum(1 for _ in islice(every(), self.samples))

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that there are, by their names in the source."""
        return WINDOW_ARRAYS if self.in_windows else LINE_ARRAYS

    def _names(self) -> dict[str, str]:
        header = Header((1, self.length), np.dtype(np.int64))
        return choose(self.subject, self.fields, dict.fromkeys(self.arrays, header))

    def _windows(self) -> Iterator[Array]:
        cut = Windows(self.subject, self.length, self.stride or self.length).cut
        with self._guard():
            yield from cut(token_stream(open_tokenizer(self.tokenizer), self._pieces()))

    def _lines(self) -> Iterator[Record]:
        """Yield the lines of all files, at least one.

        Raises:
            DataError: there is none.
        """
        empty = True
        with self._guard():
            for path in self.files():
                with path.open("rb") as stream:
                    for record in self.records(path, stream):
                        yield record
                        empty = False
        if empty:
            raise DataError(self.subject, "has no lines of text", "write one sample a line")

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


class TextSource(TokenSource):
    """Tokenized samples of a text file in UTF-8, or of all ``.txt`` files in a folder.

    In windows, each file is one document. With ``samples-per: line``, empty lines are passed over.
    """

    kind: ClassVar[str] = "text file"
    suffix: ClassVar[str] = ".txt"

    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the file as one document."""
        yield text_pieces(path, stream)

    def records(self, path: Path, stream: IO[bytes]) -> Iterator[Record]:
        """Yield each line that is not empty."""
        for subject, text in text_lines(path, stream):
            yield Record(subject, text)


class JsonlSource(TokenSource):
    """Tokenized samples of a file with one JSON object a line, or of all ``.jsonl`` in a folder.

    The text of each object stands under ``field``. Empty lines are passed over. In windows, each
    object is one document. With ``samples-per: line`` each is a sample, and any of its fields can
    be the ``target``:

    - a number, or the name of a class, which ``label2id`` in the ``config.json`` beside the
      tokenizer numbers;
    - if the text is a list of words, a list with one label for each: it counts at the word's first
      token, and all other tokens have the label -100;
    - for a pair, ``[start, end]`` in characters of the second text: the place of an answer's first
      and last token.
    """

    kind: ClassVar[str] = "JSON Lines file"
    suffix: ClassVar[str] = ".jsonl"

    field: str = Field(default="text", description="key of the text in each object")
    text_pair: str | None = Field(
        default=None, description="key of the second text of each line, for models of pairs"
    )

    def documents(self, path: Path, stream: IO[bytes]) -> Iterator[Iterator[str]]:
        """Yield the text of each line's object."""
        for subject, value in objects(path, stream):
            text = text_of(subject, value, "field", self.field)
            yield (text[start : start + PIECE] for start in range(0, len(text), PIECE))

    def records(self, path: Path, stream: IO[bytes]) -> Iterator[Record]:
        """Yield each line's object."""
        wanted = [name for name in self.fields.values() if name not in LINE_ARRAYS]
        for subject, value in objects(path, stream):
            text = text_or_words(subject, value, "field", self.field)
            pair = self.text_pair and text_of(subject, value, "text-pair", self.text_pair)
            answers = {name: field_of(subject, value, "target", name) for name in wanted}
            yield Record(subject, text, pair, answers)

    @property
    def arrays(self) -> tuple[str, ...]:
        """For lines, also the fields that ``inputs`` and ``target`` name."""
        names = super().arrays
        return names if self.in_windows else tuple(dict.fromkeys((*names, *self.fields.values())))
