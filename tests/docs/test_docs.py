"""The documentation is true: commands, links, specs and generated pages are checked."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from compressor import catalog
from compressor.cli.application import application
from compressor.spec.keys import (
    DataKeys,
    DataSection,
    InputKeys,
    LimitKeys,
    MetricKeys,
    ModelKeys,
    SpecKeys,
)
from compressor.spec.load import load_spec
from docs.generate import FOLDER, pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("samples/*/README.md")])
COMPLETE = "<!-- complete spec -->"
BASE = {"version": 1, "name": "base", "model": {"onnx": "m.onnx"}, "exports": [{"format": "onnx"}]}
INDEX = ("passes", "exports")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    complete: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        fence = lines[opened]
        indent = len(fence) - len(fence.lstrip())
        text = "\n".join(inner[indent:] for inner in lines[opened + 1 : number])
        before = next((above for above in reversed(lines[:opened]) if above.strip()), "")
        yield Block(
            page, opened + 1, fence.strip().removeprefix("```"), text, before.strip() == COMPLETE
        )
        opened = None
    assert opened is None, f"{page}: a fence is not closed"


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
YAML_BLOCKS = [block for block in ALL_BLOCKS if block.language == "yaml"]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_generated_pages_are_up_to_date() -> None:
    made = pages()
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    assert written.keys() == made.keys()
    for name, text in made.items():
        assert written[name] == text, f"{name}: run python docs/generate.py"


def test_reference_has_every_built_in_entry_and_option() -> None:
    made = pages()
    kinds: dict[catalog.Kind, str] = {
        "pass": "passes.md",
        "observer": "observers.md",
        "exporter": "exporters.md",
        "source": "sources.md",
    }
    for kind, page in kinds.items():
        assert re.findall(r"^## (.+)$", made[page], re.M) == list(catalog.BUILT_IN[kind])
    options = re.findall(r"^\| `([\w.\[\]-]+)` \|", made["passes.md"], re.M)
    assert {"weights.bits", "activations.observer", "layers[].match", "keep-io"} <= set(options)


# Links


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links() -> list[tuple[Path, str]]:
    pattern = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|src=\"([^\"]+)\"")
    found = [(page, a or b) for page in PAGES for a, b in pattern.findall(prose(page))]
    return [(page, link) for page, link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize(("page", "link"), links(), ids=lambda v: str(v).removeprefix(str(ROOT)))
def test_relative_links_resolve(page: Path, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    assert target.exists(), f"{page}: {link}"
    assert target.is_relative_to(ROOT)
    if anchor:
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
        assert anchor in [slug(heading) for heading in headings], f"{page}: {link}"


def test_every_page_of_the_guide_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "index.md":
            assert f"({page.relative_to(ROOT / 'docs').as_posix()})" in index


# Commands


def commands() -> list[tuple[str, str]]:
    """Return every `compress ...` that a page shows, with its place."""
    start = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )?(?:\S+/)?(compress .+)$")
    found = []
    for page in PAGES:
        if page.name == "cli.md":  # made from the commands themselves
            continue
        text = page.read_text(encoding="utf-8")
        shown = [match[1] for line in text.splitlines() if (match := start.match(line))]
        shown += re.findall(r"`(compress [^`]+)`", prose(page))
        found += [(str(page.relative_to(ROOT)), line) for line in shown]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_exist_with_their_arguments_and_options(page: str, line: str) -> None:
    _, *arguments = shlex.split(line, comments=True)
    if arguments[0] in ("--help", "--version"):
        return
    name, *rest = (argument for argument in arguments if argument != "--debug")
    command = application.get_command(click.Context(application), name)
    assert command is not None, f"{page}: there is no command {name!r}"
    if not rest:  # the command is only spoken of
        return
    try:
        with command.make_context(name, list(rest)):
            pass
    except click.UsageError as error:
        pytest.fail(f"{page}: {line!r}: {error.format_message()}")
    known = {"passes": catalog.names("pass"), "exporters": catalog.names("exporter")}.get(name)
    for entry in rest if known else []:
        assert entry.startswith("-") or entry == "NAME" or entry in (known or ()), line


def test_commands_are_found_at_all() -> None:
    assert len(commands()) > 20
    with pytest.raises(pytest.fail.Exception):
        test_commands_exist_with_their_arguments_and_options("x.md", "compress run a.yaml --fast")
    with pytest.raises(AssertionError):
        test_commands_exist_with_their_arguments_and_options("x.md", "compress squeeze a.yaml")


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Pages are read and their links followed; a slow test writes the site."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "dummy", ROOT / "docs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    there = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))
    shown = {t for page in PAGES for t in re.findall(r"(?:`| {4})make ([a-z-]+)", page.read_text())}
    assert {"demo", "test", "setup", "check", "test-all", "bench"} <= shown <= there


# Specs


def fake_files(data: dict[str, Any], folder: Path) -> None:
    """Make whatever a spec's data entries name, empty."""
    for entry in data.values():
        kind = next(k for k in (*catalog.BUILT_IN["source"], "factory") if k in entry)
        path = folder / os.path.expandvars(entry[kind])
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "images":
            path.mkdir(exist_ok=True)
        elif kind != "factory":
            path.touch()


def as_spec(block: Block) -> dict[str, Any]:
    """Return a block as a whole spec; a part of one replaces that part of a small spec."""
    value = YAML(typ="safe").load(block.text)
    assert isinstance(value, dict), block
    return value if block.complete else {**BASE, **value}


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=str)
def test_specs_load(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSOR_DATA", str(tmp_path / "published"))
    value = as_spec(block)
    fake_files(value.get("data", {}), tmp_path)
    path = tmp_path / "spec.yaml"
    # JSON is YAML; a complete block is loaded as the reader would type it, comments included.
    path.write_text(block.text if block.complete else json.dumps(value), encoding="utf-8")
    spec = load_spec(path)
    assert [step.name for step in spec.passes] == [p["pass"] for p in value.get("passes", [])]
    for section in INDEX:
        assert len(getattr(spec, section)) == len(value.get(section, []))


def test_there_are_complete_specs() -> None:
    pages_with_one = {block.page.name for block in YAML_BLOCKS if block.complete}
    assert {"your-own-model.md", "onnx-only.md"} <= pages_with_one


def test_every_key_of_a_spec_is_explained() -> None:
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    declared = (SpecKeys, ModelKeys, InputKeys, DataSection, DataKeys, MetricKeys, LimitKeys)
    keys = [field.alias for cls in declared for field in cls.model_fields.values()]
    assert [key for key in keys if f"`{key}`" not in text] == []
