"""Plain text, tokenized."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar

from compressor.calibration.sources.token_source import TokenSource
from compressor.calibration.sources.tokenizing import PIECE
from compressor.errors import DataError


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
