"""Text in JSON Lines, tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import Field

from compressor.calibration.sources.token_source import TokenSource
from compressor.calibration.sources.tokenizing import PIECE
from compressor.errors import DataError, suggestion


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
