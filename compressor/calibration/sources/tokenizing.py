"""Tokens of text, by a ``tokenizer.json`` and the package ``tokenizers``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from compressor.errors import DataError, SpecError

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
    for encoding in tokenizer.encode_batch_fast(pieces, add_special_tokens=False):
        yield np.array(encoding.ids, np.int64)
