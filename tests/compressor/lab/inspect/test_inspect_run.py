"""What is in a run's output folder: the parts that a whole run does not reach."""

from pathlib import Path

import pytest

from compressor.errors import ModelError
from compressor.lab.inspect.contents import RunContents
from compressor.lab.inspect.path import inspect_path
from compressor.types.proofs import sealed_text

MANIFEST = {"name": "n", "seed": 1, "versions": {"python": "3"}, "outputs": [], "spec": {}}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", sealed_text({**MANIFEST, "seed": "x"}), sealed_text({"outputs": 3})]
)
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match=r"manifest\.json.*it was edited or damaged"):
        inspect_path(tmp_path)


def test_a_report_that_the_manifest_does_not_vouch_for_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(sealed_text(MANIFEST))
    (tmp_path / "report.json").write_text("{not json")
    contents = inspect_path(tmp_path / "report.json")
    assert isinstance(contents, RunContents)
    assert contents.report is None
    assert contents.intact
