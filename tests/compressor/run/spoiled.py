"""Spoil a project and run it: a message of one line, an exit code, and nothing is left."""

from collections.abc import Callable

from click.testing import CliRunner

from compressor.cli.application import application
from tests.compressor.tiny_project import (
    Project,
    forget_modules,
)

Spoil = Callable[[Project], None]


def refused(project: Project, code: int) -> str:
    """Run a project; return the message, its folder's name shortened."""
    forget_modules()
    result = CliRunner().invoke(application, ["run", str(project.path), "--quiet"])
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert project.leftovers() == []
    return result.stderr.replace(str(project.folder), "FOLDER")


def check(project: Project, spoil: Spoil, code: int, *parts: str) -> None:
    """Spoil a project and run it: the message has all parts, and no output folder was made."""
    spoil(project)
    message = refused(project, code)
    for part in parts:
        assert part in message
    assert not project.output.exists()


def cut(name: str, share: float) -> Spoil:
    def write(project: Project) -> None:
        content = (project.folder / name).read_bytes()
        (project.folder / name).write_bytes(content[: int(len(content) * share)])

    return write


NOT_FINITE = ("holds 2 values that are NaN or infinite", "use an earlier checkpoint")
