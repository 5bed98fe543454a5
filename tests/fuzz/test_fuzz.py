"""A fixed part of ``make fuzz``: damaged and crafted files end in a message and an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fuzz.corpus import make_corpus
from tests.fuzz.judge import changed_input, verdict
from tests.fuzz.readers import READERS, Reader

INPUTS = 6
FOUND: Mapping[str, tuple[int, ...]] = {
    "archive": (459, 858, 1160),
    "history": (406,),
    "exported ONNX": (1578,),
    "model.json": (414, 594, 1332, 1681, 2060),
    "ONNX": (43, 269),
    "ONNX with external data": (76, 248, 585),
}
LATER: Mapping[str, tuple[int, ...]] = {
    "model.json": (235,),
    "exported ONNX": (1639,),
    "npy": (2992,),
    "ONNX": (422,),
    "ONNX with external data": (1026, 1349),
    "single samples": (559,),
    "YAML spec": (7,),
}
LAST: Mapping[str, tuple[int, ...]] = {
    "model.json": (297, 6109),
    "ONNX": (98, 503, 2261, 4035, 5165),
    "Hugging Face config": (4827,),
    "images": (6032,),
}
"""Inputs of the seeds 4, 5 and 7 that once ended badly."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    make_corpus(folder)
    return folder


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_changed_files_are_refused_in_order(reader: Reader, corpus: Path, tmp_path: Path) -> None:
    inputs = [(1, number) for number in range(INPUTS)]
    inputs += [(4, number) for number in FOUND.get(reader.name, ())]
    inputs += [(5, number) for number in LATER.get(reader.name, ())]
    inputs += [(7, number) for number in LAST.get(reader.name, ())]
    for seed, number in inputs:
        file = changed_input(reader, seed, number, corpus, tmp_path / "input")
        problem = verdict(reader, number, file, tmp_path / "input")
        assert not problem, f"tests.fuzz.run --seed {seed} --only '{reader.name}:{number}'"
