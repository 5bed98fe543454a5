"""Profiles: from the spec to the shapes that an engine is built for, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import SpecError
from compressor.exporters import TensorrtExporter
from compressor.exporters.tensorrt.profiles import BatchRange, ShapeRange, resolve_profiles
from compressor.spec.source_text import Document
from compressor.spec.validate import validate
from compressor.types.tensors import TensorSpec

IMAGE = TensorSpec("image", ("batch", 3, 32, 32), "float32")
TOKENS = TensorSpec("tokens", ("batch", "length"), "int64")
MASK = TensorSpec("mask", ("batch", "length"), "int64")
FIXED = TensorSpec("fixed", (1, 4), "float32")
BATCH = BatchRange(opt=8, max=64)


def shapes(low: Any, best: Any, high: Any) -> ShapeRange:
    return ShapeRange(min=tuple(low), opt=tuple(best), max=tuple(high))


def test_a_batch_is_enough_where_only_the_batch_is_dynamic() -> None:
    assert resolve_profiles([IMAGE, FIXED], {}, BATCH) == {
        "image": ShapeRange(min=(1, 3, 32, 32), opt=(8, 3, 32, 32), max=(64, 3, 32, 32))
    }
    assert resolve_profiles([FIXED], {}, None) == {}


def test_a_profile_of_its_own_comes_first() -> None:
    own = {"image": shapes([2, 3, 32, 32], [2, 3, 32, 32], [4, 3, 32, 32])}
    assert resolve_profiles([IMAGE], own, BATCH)["image"].max[0] == 4


WRONG: list[tuple[list[TensorSpec], dict[str, ShapeRange], BatchRange | None, str]] = [
    (
        [IMAGE], {}, None,
        r"input 'image': has dynamic dimensions \(\[batch, 3, 32, 32\]\) and no profile; "
        r"add batch: \{min: 1, opt: 8, max: 64\}",
    ),
    (
        [TOKENS, MASK], {}, BATCH,
        r"'tokens': has dynamic .* add profiles: \{tokens: \{min: \[1, 1\], opt: \[8, 8\], "
        r"max: \[64, 64\]\}, mask: \{min: \[1, 1\]",
    ),
    ([IMAGE], {"imgae": shapes([1], [1], [1])}, BATCH, "'imgae': names no input.*did you mean"),
    (
        [IMAGE], {"image": shapes([1, 32, 32], [1, 32, 32], [1, 32, 32])}, None,
        "'image': min has 3 dimensions, the input has 4.*write it as",
    ),
    (
        [IMAGE], {"image": shapes([1, 3, 32, 32], [1, 3, 48, 32], [1, 3, 48, 32])}, None,
        "'image': opt sets dimension 2 to 48, which the model fixes to 32",
    ),
    (
        [IMAGE], {"image": shapes([4, 3, 32, 32], [2, 3, 32, 32], [8, 3, 32, 32])}, None,
        "'image': dimension 0 has min 4, opt 2 and max 8; order them so that min <= opt <= max",
    ),
    ([IMAGE], {}, BatchRange(min=9, opt=8, max=64), "dimension 0 has min 9, opt 8 and max 64"),
    (
        [TOKENS, MASK],
        {"tokens": shapes([1, 4], [1, 8], [1, 16]), "mask": shapes([1, 4], [1, 8], [1, 32])}, None,
        "'mask': gives dimension 'length' 4, 8, 32; input 'tokens' gives it 4, 8, 16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "own", "batch", "message"), WRONG)
def test_what_is_wrong_is_named(
    inputs: list[TensorSpec], own: dict[str, ShapeRange], batch: BatchRange | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        resolve_profiles(inputs, own, batch)


LENGTHS = st.lists(st.integers(1, 9), min_size=3, max_size=3)


@given(LENGTHS, LENGTHS)
def test_sorted_lengths_pass_and_others_do_not(first: list[int], second: list[int]) -> None:
    columns = list(zip(first, second, strict=True))
    own = {"tokens": shapes(*columns)}
    if first == sorted(first) and second == sorted(second):
        assert resolve_profiles([TOKENS], own, None)["tokens"].opt == columns[1]
    else:
        with pytest.raises(SpecError, match="order them so that"):
            resolve_profiles([TOKENS], own, None)


def declared(**keys: Any) -> TensorrtExporter:
    return validate(TensorrtExporter, keys, Document(Path("spec.yaml"), {}, {}), ("exports", 0))


def test_a_spec_in_full() -> None:
    made = declared(
        **{
            "compute-capability": ["8.6"],
            "profiles": {"tokens": {"min": [1, 1], "opt": [8, 64], "max": [64, 512]}},
        }
    )
    assert made.compute_capability == ("8.6",)
    assert resolve_profiles([TOKENS], made.profiles, made.batch)["tokens"].max == (64, 512)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"compute-capability": [8.6]}, "compute-capability.0: is 8.6"),
        ({"compute-capability": ["sm86"]}, "compute-capability.0: is .sm86."),
        ({"batch": {"max": 8}}, "batch.opt: is missing"),
        ({"batch": {"opt": 0, "max": 8}}, "batch.opt: is 0"),
        ({"profiles": {"x": {"min": [1]}}}, "profiles.x.max: is missing|profiles.x.opt: is miss"),
        ({"builder": "rxt"}, "builder: is .rxt."),
    ],
)  # fmt: skip
def test_malformed_keys(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        declared(**keys)
