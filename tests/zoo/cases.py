"""What a case of the zoo is: a model, where it comes from, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw
from ruamel.yaml import YAML

from compressor.types.tensors import Array, Batch, TensorSpec
from tests import small_zoo

Kind = Literal["network", "directory", "file"]
TABLE = Path(__file__).with_name("table.yaml")
_TOKENS = TensorSpec("input_ids", ("batch", "sequence"), "int64")
# Lengths of dynamic axes other than the first, which is that of samples.
LENGTHS = {"sequence": 16, "source": 12, "time": 14}
_TEXT = b"def total(items): return sum(x.price for x in items)  # "
_WORDS = 50  # integers are drawn below it, as small vocabularies ask


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        library: whose network or file it is.
        model: what the library calls it.
        inputs: those that it is given; a file declares its own, and gives lengths to dynamic axes.
        options: for the library's function.
        state: of a file, the output that each state is taken from.
        apart: if it is run only where it is named or all are asked for.
    """

    kind: Kind
    library: str
    model: str
    inputs: tuple[TensorSpec, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False

    @property
    def name(self) -> str:
        return f"{self.library}/{self.model}"


def cases() -> tuple[Case, ...]:
    """Return the table: a kind after the other, so that a run that is stopped has seen all.

    Those apart come last.
    """
    table = YAML(typ="safe").load(TABLE)
    kinds: tuple[Kind, ...] = ("network", "directory", "file")
    groups = [
        _mixed([list(_ROWS[kind](library, rows)) for library, rows in table[kind].items()])
        for kind in kinds
    ]
    named = [replace(case, apart=case.name in table["apart"]) for case in _mixed(groups)]
    return tuple(sorted(named, key=lambda case: case.apart))


def _mixed(groups: Sequence[Sequence[Case]]) -> list[Case]:
    return [c for several in zip_longest(*groups) for c in several if c is not None]


def _networks(library: str, rows: Any) -> Iterator[Case]:
    if library == "small":
        yield from (Case("network", library, a.name, a.inputs) for a in small_zoo.ZOO)
        return
    for model, row in rows.items():
        options = {"side": row} if isinstance(row, int) else dict(row)
        side = options.pop("side", None)
        inputs = options.pop("inputs", {"x": [3, side, side]})
        yield Case("network", library, model, _specs(inputs), options)


def _directories(library: str, rows: Any) -> Iterator[Case]:
    for kind, inputs in rows.items():
        yield Case("directory", library, kind, _specs(inputs) if inputs else (_TOKENS,))


def _files(library: str, rows: Any) -> Iterator[Case]:
    for model, row in rows.items():
        options = dict(row or {})
        state = options.pop("state", {})
        yield Case("file", library, model, (), options, state)


_ROWS: Mapping[Kind, Callable[[str, Any], Iterator[Case]]] = {
    "network": _networks,
    "directory": _directories,
    "file": _files,
}


def _specs(inputs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return inputs whose first axis, which is left out in the table, is that of samples."""
    full = {k: v if isinstance(v, dict) else {"shape": v} for k, v in inputs.items()}
    return tuple(
        TensorSpec(name, ("batch", *value["shape"]), value.get("dtype", "float32"))
        for name, value in full.items()
    )


def drawn(inputs: tuple[TensorSpec, ...], count: int, seed: int, like: str = "") -> Batch:
    """Draw inputs from a standard normal distribution, or integers; masks hold ones.

    Args:
        like: what floats look like instead, where a trained network says nothing about noise:
            ``page`` or ``voice``; or ``text`` for integers.
    """
    rng = np.random.default_rng(seed)
    batch: Batch = {}
    for spec in inputs:
        axes = [LENGTHS.get(d, count) if isinstance(d, str) else int(d or 1) for d in spec.shape]
        if "mask" in spec.name:
            batch[spec.name] = np.ones(axes, spec.dtype)
        elif "lengths" in spec.name:
            batch[spec.name] = np.full(axes, LENGTHS["sequence"], spec.dtype)
        elif like == "text":
            letters = np.frombuffer(
                b"def total(items): return sum(x.price for x in items)  # ", "u1"
            )
            places = rng.integers(0, len(letters), (*axes[:-1], 1)) + np.arange(axes[-1])
            batch[spec.name] = letters[places % len(letters)].astype(spec.dtype)
        elif np.dtype(spec.dtype).kind != "f":
            batch[spec.name] = rng.integers(3, _WORDS, axes).astype(spec.dtype)
        elif like == "page":
            batch[spec.name] = np.stack([_page(axes[1:], rng) for _ in range(axes[0])])
        elif like == "voice":
            batch[spec.name] = _voice(axes, rng).astype(spec.dtype)
        else:
            batch[spec.name] = rng.standard_normal(axes).astype(spec.dtype)
    return batch


def _page(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return a picture of a word, ``[channels, height, width]`` from -1 to 1."""
    channels, height, width = shape
    picture = Image.new("L", (width, height), int(rng.integers(200, 256)))
    word = "".join(rng.choice(list("abcdeghkmnorstuwABDEHKRST0245"), 9))
    place = (int(rng.integers(0, 8)), int(rng.integers(0, max(1, height - 30))))
    ImageDraw.Draw(picture).text(place, word, fill=int(rng.integers(0, 90)), font_size=26)
    values = np.asarray(picture, np.float32) / 127.5 - 1
    return np.repeat(values[None], channels, 0)


def _voice(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return harmonics that come and go, at 16 kHz along the last axis."""
    seconds = np.arange(shape[-1]) / 16000
    pitch = rng.uniform(90, 250, (*shape[:-1], 1))
    tone = sum(np.sin(2 * np.pi * pitch * n * seconds) / n for n in range(1, 12))
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * 4 * seconds + rng.uniform(0, 6, (*shape[:-1], 1)))
    result: Array = 0.1 * loud * tone + 0.003 * rng.standard_normal(shape)
    return result
