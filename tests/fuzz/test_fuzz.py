"""A fixed part of ``make fuzz``: damaged and crafted files end in a message and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.corpus import make_corpus
from tests.fuzz.judge import changed_input, verdict
from tests.fuzz.readers import READERS, Reader

INPUTS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    make_corpus(folder)
    return folder


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_changed_files_are_refused_in_order(reader: Reader, corpus: Path, tmp_path: Path) -> None:
    for number in range(INPUTS):
        file = changed_input(reader, 1, number, corpus, tmp_path / "input")
        problem = verdict(reader, number, file, tmp_path / "input")
        assert not problem, f"python -m tests.fuzz.run --seed 1 --only '{reader.name}:{number}'"
