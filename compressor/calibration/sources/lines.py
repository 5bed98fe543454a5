"""Lines of text as samples: special tokens, padding, masks, pairs and labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.calibration.sources.tokenizer import (
    Padding,
    class_names,
    encode_lines,
    open_line_tokenizer,
    tells_texts_apart,
)
from compressor.errors import DataError, suggestion
from compressor.types.tensors import Array, Batch, TensorSpec

if TYPE_CHECKING:
    from tokenizers import Encoding

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
LINE_ARRAYS = (IDS, MASK, TYPES)
_LARGEST = 1 << 62
NOT_COUNTED = -100
"""The label of tokens that do not count, such as padding."""


@dataclass(frozen=True)
class Record:
    """One line of a file.

    Attributes:
        subject: how errors name it.
        text: or a list of words.
        pair: the second text of a pair.
        answers: the values of the fields that are asked for, such as labels.
    """

    subject: str
    text: str | list[str]
    pair: str | None = None
    answers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LineOptions:
    """How lines become arrays.

    Attributes:
        length: tokens of a sample at most.
        names: the arrays to make, names in the model to names in the file.
    """

    tokenizer: Path
    length: int
    padding: Padding
    names: Mapping[str, str]


def line_batches(records: Iterable[Record], options: LineOptions, size: int) -> Iterator[Batch]:
    """Yield batches of ``size`` lines, in their order.

    Raises:
        SpecError: the tokenizer cannot be opened.
        DataError: a line has no tokens, or an answer does not fit.
    """
    encoder = _Encoder(options)
    waiting: list[Record] = []
    for record in records:
        waiting.append(record)
        if len(waiting) == size:
            yield encoder.batch(waiting)
            waiting = []
    if waiting:
        yield encoder.batch(waiting)


def lines_cut(records: Iterable[Record], options: LineOptions) -> int:
    """Return how many lines have more tokens than a sample; raises as :func:`line_batches`."""
    encoder = _Encoder(options)
    return sum(bool(encoding.overflowing) for r in records for encoding in encoder.encodings([r]))


class _Encoder:
    def __init__(self, options: LineOptions):
        self._options = options
        self._tokenizer = open_line_tokenizer(options.tokenizer, options.length, options.padding)
        self._answers = Answers(class_names(options.tokenizer))
        self._typed = tells_texts_apart(options.tokenizer)

    def batch(self, records: Sequence[Record]) -> Batch:
        encodings = self.encodings(records)
        for record, encoding in zip(records, encodings, strict=True):
            if not any(encoding.attention_mask):
                raise DataError(record.subject, "has no tokens", "remove it")
        rows = {
            IDS: [e.ids for e in encodings],
            MASK: [e.attention_mask for e in encodings],
            TYPES: [e.type_ids if self._typed else [0] * len(e.ids) for e in encodings],
        }
        return {
            name: np.array(rows[stored], np.int64)
            if stored in rows
            else self._answers.array(stored, records, encodings)
            for name, stored in self._options.names.items()
        }

    def encodings(self, records: Sequence[Record]) -> list[Encoding]:
        words = isinstance(records[0].text, list)
        for record in records:
            if isinstance(record.text, list) != words or (words and record.pair is not None):
                raise DataError(
                    record.subject,
                    "mixes a list of words with text",
                    "give lists of words in all lines and without pairs, or in none",
                )
        texts = [r.text if r.pair is None else (r.text, r.pair) for r in records]
        encodings = encode_lines(self._tokenizer, texts, words=words)
        if len({len(e.ids) for e in encodings}) > 1:
            raise DataError(
                f"tokenizer '{self._options.tokenizer}'",
                "has no padding token, and samples of one batch differ in length",
                "name its pad_token in tokenizer_config.json beside it, or set batch: 1",
            )
        return encodings


class Answers:
    """Makes arrays of what files hold beside the text.

    All lines have answers of one kind, which is that of the first:

    - a number or the name of a class: ``[N]``;
    - beside a list of words, one label for each word: ``[N, tokens]``, the label at each word's
      first token, and -100 elsewhere, as ``transformers`` trains token classification;
    - beside a pair, ``[start, end]`` in characters of the second text, the end not included: the
      first and the last token of that span, ``[N, 2]``; twice 0 where it was cut off;
    - any other list of numbers: ``[N, numbers]``.

    Args:
        classes: numbers of classes by name.
    """

    def __init__(self, classes: Mapping[str, int]):
        self._classes = classes
        self._dtypes: dict[str, np.dtype[Any]] = {}

    def array(self, name: str, records: Sequence[Record], encodings: Sequence[Encoding]) -> Array:
        """Return one field of the lines, int64 or float32.

        Raises:
            DataError: a value is of another kind, or names an unknown class.
        """
        rows: list[Array] = []
        for record, encoding in zip(records, encodings, strict=True):
            row = self._row(name, record, encoding)
            dtype = self._dtypes.setdefault(name, row.dtype)
            self._check(name, row, (rows or [row])[0].shape, record)
            rows.append(row.astype(dtype))
        return np.stack(rows)

    def _row(self, name: str, record: Record, encoding: Encoding) -> Array:
        value = record.answers[name]
        several = isinstance(value, list)
        numbers = [self._number(name, v, record) for v in (value if several else [value])]
        if isinstance(record.text, list):
            if any(isinstance(n, float) for n in numbers):
                problem = f"has a fraction as {name!r}"
                raise DataError(record.subject, problem, "give whole numbers or names of classes")
            if len(numbers) != len(record.text):
                raise DataError(
                    record.subject,
                    f"has {len(numbers)} values as {name!r} for {len(record.text)} words",
                    "give one label for each word",
                )
            return _at_first_tokens(numbers, encoding.word_ids)
        if not several:
            return _values(numbers).reshape(())
        if record.pair is not None and len(numbers) == 2:
            return _span(name, numbers, record, encoding)
        return _values(numbers)

    def _number(self, name: str, value: Any, record: Record) -> int | float:
        if isinstance(value, int | float) and abs(value) < _LARGEST:
            return value
        if not isinstance(value, str):
            problem = f"has {str(value)[:40]} as {name!r}"
            raise DataError(record.subject, problem, "give numbers or names of classes")
        if value in self._classes:
            return self._classes[value]
        raise DataError(
            record.subject,
            f"has the class {value!r} as {name!r}",
            suggestion(value, self._classes)
            if self._classes
            else "give its number, or list it as label2id in config.json beside the tokenizer",
        )

    def _check(self, name: str, row: Array, shape: tuple[int, ...], record: Record) -> None:
        # Whole numbers among others become floats.
        if row.dtype.kind == "f" and self._dtypes[name].kind != "f":
            problem = f"has a fraction as {name!r}, and the first line a whole number"
            raise DataError(record.subject, problem, "write all of them like 5.0")
        if row.shape != shape:
            problem = f"has {row.size} values as {name!r}, and another line of its batch has"
            raise DataError(
                record.subject, f"{problem} {int(np.prod(shape))}", "give as many in each line"
            )


def _values(numbers: Sequence[int | float]) -> Array:
    """Return numbers as int64, or as float32 if one has a fraction or a point."""
    whole = all(isinstance(n, int) for n in numbers)
    return np.array(numbers, np.int64 if whole else np.float32)


def _at_first_tokens(labels: Sequence[int | float], words: Sequence[int | None]) -> Array:
    """Return the labels of words at their first tokens, int64 ``[tokens]``."""
    row = np.full(len(words), NOT_COUNTED, np.int64)
    before = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            row[place] = labels[word]
        before = word
    return row


def _span(
    name: str, characters: Sequence[int | float], record: Record, encoding: Encoding
) -> Array:
    """Return the first and the last token of a span in the second text, int64 ``[2]``."""
    start, end = (int(c) for c in characters)
    if not 0 <= start <= end <= len(record.pair or ""):
        raise DataError(
            record.subject,
            f"has the characters {start} to {end} as {name!r}, and its second text has "
            f"{len(record.pair or '')}",
            "count them from 0, the end not included; [0, 0] is no answer",
        )
    if start == end:
        return np.zeros(2, np.int64)
    tokens = [encoding.char_to_token(c, 1) for c in (start, end - 1)]
    return np.array([0, 0] if None in tokens else tokens, np.int64)


def width_of(inputs: Sequence[TensorSpec], names: Mapping[str, str]) -> int | None:
    """Return how many tokens a model takes; ``None`` if that is any.

    Args:
        names: names in the model to names in the file; all under their own name if empty.
    """
    for spec in inputs:
        tokens = spec.shape[1] if len(spec.shape) == 2 else None
        if names.get(spec.name, spec.name) in LINE_ARRAYS and isinstance(tokens, int):
            return tokens
    return None
