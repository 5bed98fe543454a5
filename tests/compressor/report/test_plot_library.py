"""The charts' library in the tree is the one that is on record, with its licenses."""

import json
from hashlib import sha256
from importlib.resources import files

FOLDER = files("compressor.report") / "plot"


def test_its_bytes_are_those_on_record():
    content = (FOLDER / "observable-plot.js").read_bytes()
    record = (FOLDER / "observable-plot.sha256").read_text(encoding="utf-8")
    assert sha256(content).hexdigest() == record.strip()
    assert len(content) < 300_000


def test_it_can_stand_inside_a_page():
    text = (FOLDER / "observable-plot.js").read_text(encoding="utf-8").lower()
    assert "</script" not in text
    assert "<!--" not in text


def test_it_says_what_it_is_made_of_and_under_which_licenses():
    text = (FOLDER / "observable-plot.js").read_text(encoding="utf-8")
    notice = text[: text.index("*/")]
    wanted = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert len(wanted) == 15
    for name, version in wanted.items():
        assert f"{name} {version}" in notice, name
    for holder in ("Observable, Inc.", "Mike Bostock", "Charles Karney", "Cynthia Brewer"):
        assert holder in notice
    assert "Permission to use, copy, modify, and/or distribute" in notice
