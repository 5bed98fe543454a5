"""Names that files give to files."""

from __future__ import annotations

import pytest

from compressor.files import is_file_name


@pytest.mark.parametrize("name", ["model.onnx", "a b", "…", "x" * 255, "é" * 127, ".hidden"])
def test_a_name_of_a_file_beside(name: str) -> None:
    assert is_file_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/a", "a/", "a\0", "x" * 256, "é" * 128, "\ud800", None, 3, ["a"]],
)
def test_no_name_of_a_file_beside(name: object) -> None:
    assert not is_file_name(name)
