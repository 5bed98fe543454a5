"""A fixed part of ``make fuzz``: damaged and crafted files end in a message and an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fuzz.corpus import make_corpus
from tests.fuzz.judge import changed_input, verdict
from tests.fuzz.readers import READERS, Reader

INPUTS = 6
ENDED_BADLY: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "archive": {4: (459, 858, 1160)},
    "exported ONNX": {4: (1578,), 5: (1639,), 12: (3808,)},
    "files for devices": {31: (1859,)},
    "history": {4: (406,)},
    "Hugging Face config": {7: (4827,)},
    "images": {7: (6032,)},
    "model.json": {
        4: (414, 594, 1332, 1681, 2060),
        5: (235,),
        7: (297, 6109),
        8: (904,),
        9: (2112,),
        10: (2441,),
    },
    "npy": {5: (2992,)},
    "ONNX": {4: (43, 269), 5: (422,), 7: (98, 503, 2261, 4035, 5165)},
    "ONNX with external data": {4: (76, 248, 585), 5: (1026, 1349)},
    "single samples": {5: (559,)},
    "sounds": {21: (22,)},
    "tokenizer": {10: (5229,)},
    "YAML spec": {5: (7,), 11: (206,)},
}
"""By reader and seed, the inputs of earlier rounds that once ended badly."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    make_corpus(folder)
    return folder


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_changed_files_are_refused_in_order(reader: Reader, corpus: Path, tmp_path: Path) -> None:
    inputs = [(1, number) for number in range(INPUTS)]
    earlier = ENDED_BADLY.get(reader.name, {})
    inputs += [(seed, number) for seed, numbers in earlier.items() for number in numbers]
    for seed, number in inputs:
        file = changed_input(reader, seed, number, corpus, tmp_path / "input")
        problem = verdict(reader, number, file, tmp_path / "input")
        assert not problem, f"tests.fuzz.run --seed {seed} --only '{reader.name}:{number}'"
