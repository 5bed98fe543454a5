"""Fixtures for tests of the codec."""

from pathlib import Path

import pytest

from compressor.exporters import SafetensorsExporter
from tests.compressor.exporters.hand_made import CONTEXT, quantized


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    SafetensorsExporter().write(quantized(), tmp_path, CONTEXT)
    return tmp_path
