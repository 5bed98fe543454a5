"""The catalog: what is built in, and what third parties add through entry points."""

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from compressor import catalog
from compressor.cli.application import failed
from compressor.errors import ExitCode, SpecError
from tests.compressor.spine_plugins import HERE, Nudge
from tests.compressor.tiny_project import forget_catalog


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution of somebody else's, as pip would have installed it."""
    info = tmp_path / "somebody_elses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-elses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[compressor.passes]\n"
        f"shake = {HERE}:Nudge\n"
        f"fuse = {HERE}:Nudge\n"
        "another = no_such_module:Pass\n"
        "tremble = somebody_elses.shaking:tremble\n"
    )
    package = tmp_path / "somebody_elses"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shaking.py").write_text(
        "import numpy as np\n\ndef tremble(then):\n    return then(), np.ones(2).reshape(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    forget_catalog()
    yield tmp_path
    forget_catalog()


def test_third_parties_come_after_what_is_built_in(distribution: Path):
    names = catalog.names("pass")
    assert names[: len(catalog.BUILT_IN["pass"])] == tuple(catalog.BUILT_IN["pass"])
    assert names[len(catalog.BUILT_IN["pass"]) :] == ("another", "shake", "tremble")
    assert catalog.load("pass", "shake") is Nudge


def test_third_parties_replace_nothing(distribution: Path):
    assert catalog.load("pass", "fuse").__name__ == "Fuse"


def test_what_a_third_party_raises_is_not_ours(
    distribution: Path, capsys: pytest.CaptureFixture[str]
):
    """An exception in a graph pass of one's own was an internal error, to be reported to us."""

    tremble = catalog.load("pass", "tremble")
    for inner, what in (
        (list, "raised ValueError: cannot reshape array of size 2 into shape (3,)"),
        (partial(catalog.resolve, ""), "raised ValueError: Empty module name"),
    ):
        with pytest.raises(ValueError, match=r"reshape|Empty") as raised:
            tremble(inner)
        assert failed(raised.value, debug=False) == ExitCode.BAD_INPUT
        assert capsys.readouterr().err == (
            f"error: package 'somebody_elses' (shaking.py, line 4): {what}; "
            "correct it, or report it to its authors; --debug shows the traceback\n"
        )


def test_unknown_names():
    with pytest.raises(SpecError, match="pass 'fuze': is not known; did you mean 'fuse'"):
        catalog.load("pass", "fuze")
    with pytest.raises(SpecError, match="observer 'qqq': is not known; there is: "):
        catalog.load("observer", "qqq")


def test_names_of_one_kind_are_not_those_of_another():
    with pytest.raises(SpecError, match="exporter 'fuse': is not known"):
        catalog.load("exporter", "fuse")
