"""The tokenizer of a directory as llama.cpp has it: tokens, types, merges, special ones, template.

llama.cpp has code of its own for each kind of tokenizer. A ``tokenizer.json`` is taken if it is of
one of these kinds:

- byte-pair encoding over bytes (Llama 3, Qwen), llama.cpp's ``gpt2``. How it cuts text before it
  merges is known to llama.cpp by a name;
- byte-pair encoding as SentencePiece has it (Llama 2, Mistral, Gemma), llama.cpp's ``llama``. It
  merges by scores of tokens, which follow from the order of the merges;
- single characters of one byte without merges, on text as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, SpecError
from compressor.files import read_json

FILE = "tokenizer.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types
_SPACE = "▁"  # SentencePiece's sign for a blank
_COMMON = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {_COMMON % "{1,3}": "llama-bpe", _COMMON % "": "qwen2"}
_REMEDY = "set llama.cpp's name for it, such as pre-tokenizer: default, or leave out this export"


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file holds of a tokenizer.

    Attributes:
        model: llama.cpp's name of the kind.
        cut: llama.cpp's name of how text is cut before it is merged; empty where it is not.
        tokens: by number.
        types: llama.cpp's type of each.
        scores: of each, where merges follow from them.
        merges: pairs, the two parts separated by a blank.
        space_prefix: a blank is put in front of text; ``None`` where the kind has no such thing.
        special: numbers of special tokens, by their role (``bos``, ``eos``, ``unk``, ...).
        added: whether a special token is added to text, by its role.
        template: that of a chat, in Jinja; or several by name.
    """

    model: str
    cut: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    space_prefix: bool | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, bool] = field(default_factory=dict)
    template: str | Sequence[Mapping[str, str]] | None = None

    def add_to(self, writer: Any) -> None:
        """Give everything to a ``gguf.GGUFWriter``."""
        writer.add_tokenizer_model(self.model)
        if self.cut:
            writer.add_tokenizer_pre(self.cut)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.space_prefix is not None:
            writer.add_add_space_prefix(self.space_prefix)
        for role, number in self.special.items():
            getattr(writer, f"add_{role}_token_id")(number)
        for role, adds in self.added.items():
            if role in ("bos", "eos", "sep"):
                getattr(writer, f"add_add_{role}_token")(adds)
        if self.template:
            writer.add_chat_template(self.template)


def read_vocabulary(folder: Path, size: int, cut: str | None = None) -> Vocabulary:
    """Read the tokenizer of a directory.

    Args:
        size: rows of the model's table. More than there are tokens are given names of their own.
        cut: llama.cpp's name of how text is cut, if it is not to be found out.

    Raises:
        SpecError: there is no ``tokenizer.json``, or llama.cpp has no code for its kind.
        ModelError: it is malformed, or has more tokens than the model.
    """
    path = folder / FILE
    if not path.is_file():
        raise SpecError(
            f"checkpoint {str(folder)!r}",
            f"has no {FILE}, and a GGUF file holds its tokenizer",
            f"save it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes {FILE}",
        )
    subject = f"tokenizer {str(path)!r}"
    content = read_json(path, subject, "cannot be read")
    try:
        made = _converted(content, size, cut, subject)
        special, added, template = _special(folder, size)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            subject, f"is malformed ({type(error).__name__}: {error})", "fetch it again"
        ) from error
    return Vocabulary(**{**vars(made), "special": special, "added": added, "template": template})


def _converted(content: Mapping[str, Any], size: int, cut: str | None, subject: str) -> Vocabulary:
    model = content["model"]
    kind = model.get("type", "BPE" if "merges" in model else "unknown")
    if kind != "BPE":
        raise SpecError(
            subject,
            f"is of the kind {kind!r}; only byte-pair encodings can be written",
            "leave out this export",
        )
    tokens, types = _numbered(content, size, subject)
    merges = tuple(_merge(entry) for entry in model.get("merges", ()))
    parts = _parts(content.get("pre_tokenizer"))
    over_bytes = [part for part in parts if part["type"] == "ByteLevel"]
    if over_bytes:
        cut = cut or _cut(parts, over_bytes, subject)
        return Vocabulary("gpt2", cut, tuple(tokens), tuple(types), merges=merges or _NEVER)
    if model.get("byte_fallback") or any(token.startswith(_SPACE) for token in tokens):
        return _sentence_piece(content, tokens, types, merges)
    steps = [*parts, *_parts(content.get("normalizer"))]
    longer = any(t == _NORMAL and len(tokens[i].encode()) > 1 for i, t in enumerate(types))
    if merges or steps or longer:
        raise SpecError(
            subject,
            "works on characters, not bytes, and has no bytes for those that it does not know; "
            "llama.cpp has no such tokenizer",
            "leave out this export",
        )
    characters = _characters_of_bytes()
    plain = [
        characters[token.encode()[0]] if types[i] == _NORMAL and token else token
        for i, token in enumerate(tokens)
    ]
    return Vocabulary("gpt2", cut or "default", tuple(plain), tuple(types), merges=_NEVER)


# llama.cpp wants one merge at least. The result of this one is not a token, so it is undone.
_NEVER = ("Ġ Ġ",)


def _numbered(content: Mapping[str, Any], size: int, subject: str) -> tuple[list[str], list[int]]:
    """Return token and type of each number."""
    vocabulary: dict[str, int] = dict(content["model"]["vocab"])
    unknown = content["model"].get("unk_token")
    kinds = dict.fromkeys(vocabulary.values(), _NORMAL)
    if content["model"].get("byte_fallback"):
        for value in range(256):
            if (number := vocabulary.get(f"<0x{value:02X}>")) is not None:
                kinds[number] = _BYTE
    for entry in content.get("added_tokens") or ():
        vocabulary[entry["content"]] = entry["id"]
        kinds[entry["id"]] = _CONTROL if entry.get("special") else _USER_DEFINED
    if unknown in vocabulary:
        kinds[vocabulary[unknown]] = _UNKNOWN
    highest = max(vocabulary.values(), default=-1)
    if highest >= size:
        raise ModelError(
            subject,
            f"has a token of number {highest}, the model has {size}",
            "tokenizer and weights belong to different models; fetch both again",
        )
    names = {number: token for token, number in vocabulary.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    return tokens, [kinds.get(number, _UNUSED) for number in range(size)]


def _sentence_piece(
    content: Mapping[str, Any], tokens: list[str], types: list[int], merges: Sequence[str]
) -> Vocabulary:
    """Return a vocabulary whose scores put merges in the order of their list."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    scores = tuple(-float(ranks.get(token, -1) + 1) for token in tokens)
    parts = [*_parts(content.get("normalizer")), *_parts(content.get("pre_tokenizer"))]
    prefix = any(
        part["type"] == "Prepend"
        or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )
    return Vocabulary("llama", "", tuple(tokens), tuple(types), scores, space_prefix=prefix)


def _cut(parts: Sequence[Mapping[str, Any]], over_bytes: Sequence[Any], subject: str) -> str:
    """Return llama.cpp's name of how a tokenizer cuts text."""
    patterns = [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
    others = [part["type"] for part in parts if part["type"] not in ("Split", "ByteLevel")]
    if not others and not patterns and over_bytes[0].get("use_regex", True):
        return "gpt-2"
    if not others and len(patterns) == 1 and patterns[0] in _CUTS:
        return _CUTS[patterns[0]]
    shown = f"pattern {patterns[0]!r}" if patterns else " and ".join(others) or "nothing"
    raise SpecError(subject, f"cuts text by {shown}, for which no name is known", _REMEDY)


def _parts(step: Any) -> list[Mapping[str, Any]]:
    """Return the single steps of a normalizer or pre-tokenizer."""
    if not step:
        return []
    inner = step.get("pretokenizers") or step.get("normalizers")
    if step["type"] == "Sequence":
        return [part for entry in inner or () for part in _parts(entry)]
    return [step]


def _merge(entry: Any) -> str:
    """Return a merge as one text; in the newer form of the file it is a pair."""
    if isinstance(entry, str):
        return entry
    first, second = entry
    return f"{first} {second}"


def _characters_of_bytes() -> list[str]:
    """Return the character that stands for each byte in byte-pair encodings over bytes.

    That of GPT-2: printable ones for themselves, and others for those from 256 on, in order.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(value) if value in shown else chr(next(others)) for value in range(256)]


def _special(folder: Path, size: int) -> tuple[dict[str, int], dict[str, bool], Any]:
    """Return roles of special tokens, which of them are added, and the template."""
    from gguf import SpecialVocab

    with _quiet():
        found = SpecialVocab(folder, n_vocab=size)
    return dict(found.special_token_ids), dict(found.add_special_token), found.chat_template


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's log from the terminal."""
    logger = logging.getLogger("gguf")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
