"""Text files and JSON Lines as they are read: pieces of text, and objects line by line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from compressor.calibration.sources.tokenizer import PIECE
from compressor.errors import DataError, suggestion


def text_pieces(path: Path, stream: IO[bytes]) -> Iterator[str]:
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
                "convert it from the encoding that it has, e.g. with iconv -f latin1 -t utf-8",
            ) from error
        position += len(part)
        if text:
            yield text


def text_lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield how errors name each line that is not empty, and its text.

    Raises:
        DataError: the bytes are not UTF-8.
    """
    for subject, line in _lines(path, stream):
        text = _decoded(subject, line).rstrip("\r\n")
        if text.strip():
            yield subject, text


def objects(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield how errors name each line that is not empty, and its object.

    Raises:
        DataError: a line is not a JSON object in UTF-8.
    """
    for subject, line in _lines(path, stream):
        text = _decoded(subject, line)
        try:
            value: Any = json.loads(text)
            if "\\u" in text:  # half of a surrogate pair is no text
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(
                subject, f"is not JSON ({error})", "write one JSON object a line"
            ) from error
        if not isinstance(value, dict):
            remedy = 'write it like {"text": "..."}'
            raise DataError(subject, f"holds a {type(value).__name__}, not an object", remedy)
        yield subject, value


def text_of(subject: str, value: Mapping[str, Any], key: str, name: str) -> str:
    """Return the text in a field of an object.

    Args:
        key: the option that names the field.

    Raises:
        DataError: there is no such field, or it is no text.
    """
    text = field_of(subject, value, key, name)
    if isinstance(text, str):
        return text
    raise DataError(subject, f"has a {type(text).__name__} as {name!r}", "give a string")


def text_or_words(subject: str, value: Mapping[str, Any], key: str, name: str) -> str | list[str]:
    """Return the text in a field of an object, or its list of words; raises as ``text_of``."""
    words = value.get(name)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    return text_of(subject, value, key, name)


def field_of(subject: str, value: Mapping[str, Any], key: str, name: str) -> Any:
    """Return a field of an object; raises ``DataError`` if there is none."""
    if name in value:
        return value[name]
    raise DataError(subject, f"has no {name!r}", f"set {key}: {suggestion(name, list(value))}")


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield f"data '{path}', line {number}", line


def _decoded(subject: str, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(subject, f"is not UTF-8 ({error.reason})", "convert it") from error
