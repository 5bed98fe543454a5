"""Batches of a Python program: which forms are taken, in which order, and what is refused."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from compressor.calibration.sources.iterables import ProgramBatches, parts, program_batches
from compressor.calibration.sources.user_functions import FactorySource
from compressor.errors import DataError
from compressor.types.tensors import TensorSpec

ONE = (TensorSpec("image", ("batch", 3), "float32"),)
TWO = (*ONE, TensorSpec("mask", ("batch",), "int64"))
X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8)
TENSORS = torch.from_numpy(X), torch.from_numpy(Y)


def made(items: Any, inputs: Any = ONE, target: str | None = None, **more: Any) -> ProgramBatches:
    return program_batches(items, "data.evaluation", inputs, target, 0, complete=False, **more)


def seed_all() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002  # what programs seed
    random.seed(7)


def drawn() -> tuple[float, float, float]:
    return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002


class Arrow:
    """As a dataset of the library ``datasets``: rows of Python values, and ``iter`` for batches."""

    column_names = ("image", "label", "text")

    def iter(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for start in range(0, 8, batch_size):
            rows = slice(start, start + batch_size)
            yield {"image": X[rows].tolist(), "label": Y[rows].tolist(), "text": ["a", "bc"]}


@pytest.mark.parametrize(
    ("items", "target"),
    [
        ([(X[:4], Y[:4]), (X[4:], Y[4:])], "target"),
        ([[TENSORS[0], TENSORS[1]]], "target"),
        (TENSORS, "target"),
        ({"image": X, "label": Y}, "label"),
        ([UserDict(image=TENSORS[0], labels=TENSORS[1])], "labels"),
        ([({"image": X}, Y)], "target"),
        ([((X,), Y)], "target"),
        (DataLoader(TensorDataset(*TENSORS), 3), "target"),
        (TensorDataset(*TENSORS), "target"),
        (Arrow(), "label"),
        (((X[i : i + 4], Y[i : i + 4]) for i in (0, 4)), "target"),
        (lambda: iter([(X, Y)]), "target"),
        (X, None),
        ([TENSORS[0].double()], None),
        ([TENSORS[0].bfloat16()], None),
    ],
)
def test_every_usual_form_gives_the_same_samples(items: Any, target: str | None):
    batches = made(items)
    assert batches.target == target
    for _ in range(2):  # and again
        joined = list(FactorySource(batches, "x").batches(8))
        assert len(joined) == 1
        assert joined[0].keys() == {"image"} | ({target} if target else set())
        assert joined[0]["image"].dtype == np.float32
        assert np.array_equal(joined[0]["image"], X)
        if target:
            assert np.array_equal(joined[0][target], Y)


def test_a_tuple_has_the_inputs_first():
    batch = next(iter(made([(X, Y, Y + 1)], TWO)()))
    assert {n: a.shape for n, a in batch.items()} == {"image": (8, 3), "mask": (8,), "target": (8,)}
    assert np.array_equal(batch["target"], Y + 1)
    assert made([(X, Y)], TWO).target is None
    assert next(iter(made([(X, Y)], ONE, "class")())).keys() == {"image", "class"}
    assert parts([(X,), Y], 1)[1] == [Y]


def test_a_transform_is_given_all_that_a_dictionary_has():
    batches = program_batches([{"raw": X, "id": Y}], "d", ONE, None, 0, complete=True)
    assert next(iter(batches())).keys() == {"raw", "id"}


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)])
def test_a_loader_that_shuffles_has_one_order_and_leaves_random_numbers_alone(
    generator: torch.Generator | None,
):
    loader = DataLoader(TensorDataset(*TENSORS), 2, shuffle=True, generator=generator)
    seed_all()
    wanted = drawn()
    seed_all()
    batches = made(loader)
    orders = []
    for _ in range(2):
        read = list(batches())
        torch.rand(3)  # what the program draws changes nothing
        orders.append(np.concatenate([b["target"] for b in read]).tolist())
    torch.manual_seed(7)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == Y.tolist()
    assert orders[0] != Y.tolist()
    assert drawn() == wanted


def test_augmentations_are_drawn_alike_each_time():
    class Noisy(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.rand(()) + drawn()[1] + random.random(), y

    batches = made(DataLoader(Noisy(*TENSORS), 4))
    first, second = (np.concatenate([b["image"] for b in batches()]) for _ in range(2))
    assert np.array_equal(first, second)
    assert len(set((first - X)[:, 0].round(3))) == 8  # each sample draws its own


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (5, "is a int, which holds no batches; give tensors, arrays, tuples"),
        ([], "has no batches"),
        ([("text", Y)], "has 'image' as a str; let each batch be"),
        ([([X[0].tolist(), [1.0]], Y)], "has 2 inputs in a batch, and the model takes 1"),
        ([{"image": [[1.0], [1.0, 2.0]]}], "has 'image' of no one shape"),
        ([{"image": object()}], "has 'image' as a object"),
    ],
)
def test_what_is_no_batch_is_refused(items: Any, message: str):
    with pytest.raises(DataError, match=message) as caught:
        list(made(items)())
    assert caught.value.subject == "data 'data.evaluation'"


def test_data_that_differ_from_one_reading_to_the_next_are_refused():
    own = np.random.default_rng(0)
    with pytest.raises(DataError, match="returns other samples each time that it is read"):
        made(lambda: [own.random((2, 3))])


def test_what_the_program_raises_is_an_error_of_the_data():
    def broken() -> Iterator[Any]:
        yield X
        raise KeyError("gone")

    batches = made(broken)
    with pytest.raises(DataError, match="raised KeyError: 'gone'"):
        list(batches())
