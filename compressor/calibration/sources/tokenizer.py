"""Tokenizers in the form of ``tokenizer.json``: opened, and used by their own rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from compressor.errors import DataError, ModelError, SpecError
from compressor.files import read_json

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


Tokens: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Padding: TypeAlias = Literal["longest", "length"]
PIECE = 1 << 15
"""Characters that are tokenized at a time."""
_TOGETHER = 8 * PIECE  # characters for one call, in which the library works in parallel
_MOST = 1024  # pieces for one call
_NAME = "tokenizer.json"
_OF_NO_KIND = ("PreTrainedTokenizerFast", "TokenizersBackend")
_SETTINGS, _MODEL = "tokenizer_config.json", "config.json"
_INCOMPLETE = "tokenizer", "cannot encode the text", "save it again; its vocabulary is not complete"
BESIDE = (_SETTINGS, _MODEL)
"""Files beside a tokenizer that say how it pads and what classes are called."""


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


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer that can be opened."""
    return (folder / _NAME).is_file()


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer; truncation and padding that it may be set to are switched off.

    Raises:
        SpecError: it does not exist, or the package ``tokenizers`` is not installed.
        DataError: it is malformed.
    """
    tokenizer = _read(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def open_line_tokenizer(path: Path, length: int, padding: Padding) -> Tokenizer:
    """Read a tokenizer that cuts and pads samples by its own rules.

    Which side is cut or padded, with which token, and how a pair is cut stand in
    ``tokenizer_config.json``, or else in ``tokenizer.json``, as ``transformers`` reads them. One
    without a padding token does not pad.

    Args:
        length: tokens of a sample at most, special ones included.
        padding: to the longest sample of a call, or to ``length``.

    Raises:
        SpecError: as :func:`open_tokenizer`, or its special tokens alone fill the length.
        DataError: as :func:`open_tokenizer`.
    """
    tokenizer = _read(path)
    settings, model = beside(path, _SETTINGS), beside(path, _MODEL)
    least = tokenizer.num_special_tokens_to_add(is_pair=True)
    if length <= least:
        raise SpecError(
            "length", f"is {length}, but special tokens alone may be {least}", "give more tokens"
        )
    remedy = f"correct its {_SETTINGS}, or fetch it again"
    with _library(f"tokenizer '{path}'", "does not say how to cut and pad", remedy):
        _set_truncation(tokenizer, settings, length)
        _set_padding(tokenizer, settings, model, length if padding == "length" else None)
    return tokenizer


def _set_truncation(tokenizer: Tokenizer, settings: Mapping[str, Any], length: int) -> None:
    stored = tokenizer.truncation or {}
    tokenizer.enable_truncation(
        length,
        strategy=stored.get("strategy", "longest_first"),
        direction=settings.get("truncation_side", stored.get("direction", "right")),
    )


def _set_padding(
    tokenizer: Tokenizer, settings: Mapping[str, Any], model: Mapping[str, Any], length: int | None
) -> None:
    stored = tokenizer.padding or {}
    named = settings.get("pad_token")
    token = named.get("content") if isinstance(named, dict) else named
    number = None if token is None else tokenizer.token_to_id(token)
    if number is None and stored:
        token, number = stored["pad_token"], stored["pad_id"]
    if number is None and model.get("pad_token_id") is not None:
        number = model["pad_token_id"]
        token = tokenizer.id_to_token(number)
    tokenizer.no_padding()
    if number is not None and token is not None:
        tokenizer.enable_padding(
            direction=settings.get("padding_side", stored.get("direction", "right")),
            pad_id=number,
            pad_type_id=settings.get("pad_token_type_id", stored.get("pad_type_id", 0)),
            pad_token=token,
            length=length,
        )


def tells_texts_apart(path: Path) -> bool:
    """Return whether a tokenizer says which text of a pair each token is of.

    ``transformers`` has it from ``model_input_names`` in ``tokenizer_config.json``, or else from
    the tokenizer's class: those that are made for no kind of model do not. A network then reads
    zeros, whatever types ``tokenizer.json`` states.
    """
    settings = beside(path, _SETTINGS)
    names = settings.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return settings.get("tokenizer_class") not in _OF_NO_KIND


def class_names(path: Path) -> dict[str, int]:
    """Return the numbers of classes by name, from the ``config.json`` beside a tokenizer."""
    names = beside(path, _MODEL).get("label2id")
    pairs = names.items() if isinstance(names, dict) else ()
    return {str(name): number for name, number in pairs if isinstance(number, int)}


def beside(path: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file beside a tokenizer; empty without one.

    Raises:
        DataError: it is malformed.
    """
    file = tokenizer_file(path).parent / name
    if not file.is_file():
        return {}
    try:
        value = read_json(file, f"file '{file}'", "is malformed", constants=True)
    except ModelError as error:
        raise DataError(error.subject, error.problem, error.remedy) from error
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> Tokenizer:
    file = tokenizer_file(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SpecError(
            f"tokenizer '{path}'",
            "needs the package tokenizers, which is not installed",
            'run pip install "compressor[transformers]"',
        ) from error
    remedy = "save it again with a version of tokenizers that is not newer than this one's"
    with _library(f"tokenizer '{file}'", "cannot be read", remedy):
        return Tokenizer.from_file(str(file))


def token_stream(tokenizer: Tokenizer, pieces: Iterable[str]) -> Iterator[Tokens]:
    """Yield the tokens of each piece of text, int64 ``[n]``, without special ones.

    Raises:
        DataError: the tokenizer cannot encode them, or leaves characters out.
    """
    waiting: list[str] = []
    size = 0
    kept: set[str] = set()
    for piece in pieces:
        _check_kept(tokenizer, piece, kept)
        waiting.append(piece)
        size += len(piece)
        if size >= _TOGETHER or len(waiting) >= _MOST:
            yield from _encoded(tokenizer, waiting)
            waiting, size = [], 0
    yield from _encoded(tokenizer, waiting)


def _check_kept(tokenizer: Tokenizer, piece: str, kept: set[str]) -> None:
    """Check that a tokenizer has a token for each character, unless its normalizer drops it.

    One without a token for what it does not know leaves such characters out without a word, and
    a model is then judged on another text. What is left out twice makes no more tokens than once.

    Args:
        kept: characters that were looked at before; new ones are added.

    Raises:
        DataError: it leaves one out.
    """
    if getattr(tokenizer.model, "unk_token", None) is not None:
        return
    for character in sorted(set(piece) - kept):
        kept.add(character)
        normal = tokenizer.normalizer
        text = character if normal is None else normal.normalize_str(character)
        if not text.strip():
            continue
        with _library(*_INCOMPLETE):
            once, twice = (
                tokenizer.encode(character * count, add_special_tokens=False).ids
                for count in (1, 2)
            )
        if once == twice:
            raise DataError(
                "tokenizer",
                f"has no token for {character!r}, nor one for unknown characters, and would drop "
                "it from the text",
                "use the tokenizer that the model was trained with, or take the character out",
            )


def _encoded(tokenizer: Tokenizer, pieces: list[str]) -> Iterator[Tokens]:
    with _library(*_INCOMPLETE):
        encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    for encoding in encodings:
        yield np.array(encoding.ids, np.int64)


def encode_lines(tokenizer: Tokenizer, texts: Sequence[Any], *, words: bool) -> list[Encoding]:
    """Return the encodings of whole samples, with special tokens, cut and padded.

    Args:
        texts: strings, pairs of strings, or lists of words.
        words: they are lists of words.

    Raises:
        DataError: the tokenizer cannot encode them.
    """
    with _library(*_INCOMPLETE):
        return tokenizer.encode_batch(list(texts), is_pretokenized=words)


@contextmanager
def _library(subject: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn what the library raises into ``DataError``."""
    try:
        yield
    # It raises nothing narrower, and where its Rust code fails, no Exception at all.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0][:200]
        raise DataError(subject, f"{problem} ({reason})", remedy) from error
