"""Plain text and JSON Lines, tokenized."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import Field

from compressor.calibration.sources.tokens import PIECE, TokenSource
from compressor.errors import DataError, suggestion


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
            value: Any = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(subject, f"is not UTF-8 ({error.reason})", "convert it") from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                subject, f"is not JSON ({error})", "write one JSON object a line"
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                subject,
                f"holds a {type(value).__name__}, not an object",
                f'write it like {{"{self.field}": "..."}}',
            )
        if self.field not in value:
            raise DataError(
                subject,
                f"has no {self.field!r}",
                f"set field: {suggestion(self.field, list(value))}",
            )
        text = value[self.field]
        if not isinstance(text, str):
            raise DataError(
                subject, f"has a {type(text).__name__} as {self.field!r}", "give a string"
            )
        return text
