"""Keeps the tables that benchmarks print, in the guide's page of results: ``make results``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from compressor import __version__
from compressor.run.workspace import environment

PAGE = "COMPRESSOR_RESULTS"
"""The variable that names the page; without it, tables are only printed."""
_VERSIONS = ("torch", "runtime")
_FASTER_INT8 = ("avx512_vnni", "avx_vnni")  # without them int8 is slower, and its sums saturate
_kept: set[str] = set()  # tests whose tables of an earlier run are gone from the page


def keep(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Put a table into the section of the test that prints it, in place of its earlier ones."""
    if PAGE not in os.environ:
        return
    page = Path(os.environ[PAGE])
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].rpartition("/")[2]
    text = page.read_text(encoding="utf-8")
    page.write_text(
        with_table(text, test, _table(title, header, rows), more=test in _kept), encoding="utf-8"
    )
    _kept.add(test)


def with_table(page: str, test: str, table: str, *, more: bool) -> str:
    """Return a page with a table in a test's section, which is made at the end if it is missing.

    Args:
        test: name of the section, such as ``bench_gate.py::test_power``.
        more: the table comes after those that the section has; otherwise it replaces them.
    """
    start, end = f"<!-- {test} -->", f"<!-- /{test} -->"
    if start not in page:
        page = f"{page.rstrip()}\n\n{start}\n{end}\n"
    before, _, rest = page.partition(start)
    old, _, after = rest.partition(end)
    kept = old.strip("\n") + "\n\n" if more and old.strip() else ""
    return f"{before}{start}\n{kept}{table}\n{end}{after}"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(re.sub(r"([|<*_])", r"\\\1", cell) for cell in cells) + " |"

    rule = "|---" + "|---:" * (len(header) - 1) + "|"
    return "\n".join([f"**{title}**", "", line(header), rule, *map(line, rows), "", _where()])


def _where() -> str:
    """Return when and on which machine a table was measured."""
    found = environment()
    versions = ", ".join(f"{found['versions'][name]}" for name in _VERSIONS)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    vnni = "VNNI" if any(flag in flags for flag in _FASTER_INT8) else "no VNNI"
    machine = f"{found['processor']} ({vnni}), {found['cores']} cores"
    return f"*{date.today()}, compressor {__version__}, PyTorch {versions}; {machine}.*"
