"""A gate's result as JUnit XML, which CI systems show beside their tests."""

from __future__ import annotations

from xml.etree import ElementTree as Tree

from compressor.comparison.gate import Check, GateResult


def junit_text(result: GateResult) -> str:
    """Return a test suite with one case for each check; without times, so that it is repeatable.

    What is undecided and let pass is a case that passed, with the words in its output.
    """
    side = result.comparison.candidate
    suite = Tree.Element(
        "testsuite",
        name="compress gate",
        tests=str(len(result.checks)),
        failures=str(sum(not check.ok for check in result.checks)),
        errors="0",
        skipped="0",
    )
    model = _printable(f"{side.run.report['name']}.{side.name}")
    for check in result.checks:
        suite.append(_case(check, model))
    root = Tree.Element("testsuites")
    root.append(suite)
    Tree.indent(root)
    text = Tree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(check: Check, model: str) -> Tree.Element:
    case = Tree.Element("testcase", classname=model, name=check.name)
    text = _printable(check.text)
    if not check.ok:
        failure = Tree.SubElement(case, "failure", message=text, type=check.status)
        failure.text = text
    else:
        Tree.SubElement(case, "system-out").text = f"{check.status}: {text}"
    return case


def _printable(text: str) -> str:
    """Show control characters, which XML cannot hold, by their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
