"""An archive of small files, for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compressor.exporters.archive.packed_files import packed, small_files


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("content")
    return packed(small_files(folder), folder / "model.archive")
