"""Options in plain words, from the declarations alone."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from compressor import catalog
from compressor.errors import SpecError
from compressor.report.pages.catalog import description_page, overview_page
from compressor.report.terminal import plain_text
from compressor.spec.describe import Option, describe, describe_options, overview
from compressor.types.carrier import Capability
from compressor.types.options import Options
from compressor.types.passes import LayerRule


class Inner(Options):
    """A section."""

    bits: Literal[4, 8] = Field(default=8, description="width")


class Rule(LayerRule):
    """A rule."""

    bits: Literal[4, 8] | None = Field(default=None, description="width here")


class Everything(Options):
    """All kinds of options.

    With a second ``paragraph``.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.RUN, Capability.GRAPH})
    source: ClassVar[str] = "a paper"

    count: int = Field(ge=1, description="a number")
    share: float = Field(default=0.5, gt=0, lt=1, description="wrapped\nover lines")
    level: int = Field(default=3, ge=1, le=9, description="a level")
    name: str = Field(default="", description="a name")
    kind: Literal["one", "two", 3] = Field(default="one", description="a choice")
    auto: bool | Literal["auto"] = Field(default="auto", description="maybe")
    limit: Annotated[float, Field(le=1)] | None = Field(default=None, description="a limit")
    size: tuple[int, int] = Field(default=(3, 3), description="height and width")
    words: tuple[str, ...] = Field(default=(), description="words")
    named: dict[str, float] = Field(default_factory=dict, description="numbers by name")
    free: dict[str, Any] = Field(default_factory=dict, description="anything by name")
    inner: Inner = Field(default_factory=Inner, description="a section")
    maybe: Inner | None = Field(default=None, description="a section or not")
    layers: tuple[Rule, ...] = Field(default=(), description="rules")


def test_types_in_plain_words() -> None:
    assert {option.key: option.type for option in describe_options(Everything)} == {
        "count": "integer (at least 1)",
        "share": "number (above 0 and below 1)",
        "level": "integer from 1 to 9",
        "name": "text",
        "kind": "one, two or 3",
        "auto": "true, false or auto",
        "limit": "number (at most 1) or null",
        "size": "list of integer, integer",
        "words": "list of text",
        "named": "mapping of names to number",
        "free": "mapping",
        "inner": "section",
        "maybe": "section or null",
        "layers": "list of sections",
    }


def test_defaults_as_in_a_spec() -> None:
    options = {option.key: option for option in describe_options(Everything)}
    assert options["count"].required
    assert options["count"].default is None
    assert not options["share"].required
    assert {key: option.default for key, option in options.items() if option.default} == {
        "share": "0.5",
        "level": "3",
        "name": '""',
        "kind": "one",
        "auto": "auto",
        "limit": "null",
        "size": "[3, 3]",
        "words": "[]",
        "named": "{}",
        "free": "{}",
        "maybe": "null",
        "layers": "[]",
    }
    assert options["share"].description == "wrapped over lines"


def test_sections_and_rules_are_nested() -> None:
    options = {option.key: option for option in describe_options(Everything)}
    bits = Option("bits", "4 or 8", "8", required=False, description="width")
    assert options["inner"].options == (bits,)
    assert options["maybe"].options == (bits,)
    assert [option.key for option in options["layers"].options] == ["match", "skip", "bits"]
    assert options["count"].options == ()


@pytest.fixture
def catalogued(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = {"good": f"{__name__}:Everything", "broken": "no_such_package.module:Pass"}
    monkeypatch.setattr(catalog, "BUILT_IN", {**catalog.BUILT_IN, "pass": entries})
    monkeypatch.setattr(catalog, "resolve", _resolve)
    catalog.names.cache_clear()
    catalog.load.cache_clear()
    yield
    catalog.names.cache_clear()
    catalog.load.cache_clear()


def _resolve(reference: str) -> Any:
    if reference.endswith(":Everything"):
        return Everything
    raise ModuleNotFoundError("No module named 'no_such_package'")


@pytest.mark.usefixtures("catalogued")
def test_what_does_not_import_is_listed_with_the_reason() -> None:
    good, broken = overview("pass")
    assert (good.summary, good.needs) == ("All kinds of options.", ("graph", "run"))
    assert broken.problem == "does not import (No module named 'no_such_package')"
    assert plain_text(overview_page([good, broken])).splitlines()[2:] == [
        "good     All kinds of options.                                 graph, run",
        "broken   does not import (No module named 'no_such_package')",
    ]
    with pytest.raises(SpecError, match=r"does not import .*; reinstall its package"):
        describe("pass", "broken")


@pytest.mark.usefixtures("catalogued")
def test_the_page_of_a_pass() -> None:
    lines = plain_text(description_page(describe("pass", "good"))).splitlines()
    assert lines[:8] == [
        "good",
        "",
        "All kinds of options.",
        "",
        "With a second paragraph.",
        "",
        "Needs: graph, run",
        "",
    ]
    assert lines[8] == "Source: a paper"
    assert "count     integer (at least 1)           required   a number" in lines
    assert "  bits    4 or 8                         8          width" in lines


@pytest.mark.parametrize("kind", ["pass", "exporter"])
def test_everything_built_in_is_documented(kind: Any) -> None:
    def check(options: tuple[Option, ...], name: str) -> None:
        for option in options:
            assert option.description, f"{name}: {option.key}"
            assert "any value" not in option.type, f"{name}: {option.key}"
            check(option.options, name)

    for entry in overview(kind):
        assert not entry.problem
        assert entry.summary.endswith("."), entry.name
        described = describe(kind, entry.name)
        check(described.options, entry.name)
        if kind == "pass":
            assert described.needs
            assert described.source
