"""A Llama's folder, whole and to be damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compressor.models.torch import carrier
from compressor.models.torch.lowering import lower


@pytest.fixture(scope="module")
def lowered_each_time() -> Iterator[None]:
    """Lower each module, in files whose tests are of lowering."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier, "lower", lower)
        yield


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.compressor.models.transformers_folders import save

    folder = tmp_path_factory.mktemp("llama")
    save(folder, "llama")
    return folder


@pytest.fixture
def llama_copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of the Llama folder that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
