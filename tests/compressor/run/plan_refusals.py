"""What planning refuses a project with."""

import pytest

from compressor.errors import CompressorError, SpecError
from tests.compressor.tiny_project import (
    Project,
)


def refusal(project: Project, kind: type[CompressorError] = SpecError) -> str:
    with pytest.raises(kind) as caught:
        project.plan()
    assert not project.output.exists()
    return str(caught.value).replace(str(project.folder), "FOLDER")


def line_of(project: Project, text: str) -> str:
    """Return ``file:line`` of the first line of the spec that holds a text."""
    lines = project.path.read_text(encoding="utf-8").splitlines()
    return f"FOLDER/spec.yaml:{next(i for i, line in enumerate(lines, 1) if text in line)}"
