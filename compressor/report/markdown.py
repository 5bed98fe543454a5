"""The report as Markdown, short enough for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from compressor.report.formats import NOTHING, count, short_count
from compressor.report.rows import Figure, ModelRow, PassRow, missing_reasons, model_rows, pass_rows
from compressor.report.verdict import (
    Report,
    check_rows,
    failures,
    gist,
    headline,
    limit_rows,
    main_artifact,
    metric_name,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$@])")
_PASSED, _FAILED = "✅", "❌"


def markdown_report(report: Report) -> str:
    """Render a report for a pull request, in GitHub's Markdown.

    Args:
        report: the content of ``report.json``.
    """
    sections = [
        _verdict(report),
        _models(report),
        _limits(report),
        _passes(report),
        _checks(report),
        _environment(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _verdict(report: Report) -> str:
    mark = _PASSED if report["ok"] else _FAILED
    lines = [f"# {_text(report['name'])}", f"**{mark} {_text(headline(report))}**"]
    lost = failures(report)
    if lost:
        lines.append("\n".join(f"- {_code(artifact)}: {_text(what)}" for artifact, what in lost))
    artifact = main_artifact(report)
    if artifact is not None:
        lines.append(f"{_code(artifact['path'])}: {_text(gist(report))}.")
    return "\n\n".join(lines)


def _models(report: Report) -> str:
    name = _text(metric_name(report))
    header = [
        "model",
        f"{name} (95 % CI)",
        "drop",
        "size",
        "size ratio",
        "latency p50",
        "latency ratio (95 % CI)",
    ]
    rows = [_model(row) for row in model_rows(report)]
    lines = [_table(header, rows, "lrrrrrr")]
    base = report["baseline"]
    facts = [f"{short_count(base['parameters'])} parameters"]
    if base["macs"] is not None:
        facts.append(f"{short_count(base['macs'])} MACs")
    if base["metric"] is not None:
        facts.insert(0, f"{count(base['metric']['samples'])} evaluation samples")
    if base["latency_ms"] is not None:
        facts.append(f"latency at batch {base['latency_ms']['batch']}, ratios timed side by side")
    lines.append(f"{', '.join(facts)}.")
    reasons = missing_reasons(report)
    if reasons:
        lines.append("\n".join(f"- {_text(reason)}" for reason in reasons))
    return "\n\n".join(lines)


def _model(row: ModelRow) -> list[str]:
    name = row.name if row.ok is None else f"{_PASSED if row.ok else _FAILED} {_cell(row.name)}"
    return [
        name,
        _figure(row.metric),
        _figure(row.drop),
        _figure(row.bytes),
        _figure(row.size_ratio),
        _figure(row.latency),
        _figure(row.latency_ratio),
    ]


def _limits(report: Report) -> str:
    rows = [
        [
            _text(row.name),
            _cell(row.artifact),
            row.measured,
            row.limit,
            f"{_PASSED if row.ok else _FAILED} {row.note}".rstrip(),
        ]
        for row in limit_rows(report)
    ]
    if not rows:
        return ""
    table = _table(["limit", "artifact", "measured", "at most", ""], rows, "llrrl")
    return f"## Limits\n\n{table}"


def _passes(report: Report) -> str:
    passes = pass_rows(report)
    if not passes:
        return ""
    header = ["pass", "time", f"{_text(metric_name(report))} after", "drop", "SQNR", "bytes"]
    rows = [_pass(row) for row in passes]
    lines = ["## Passes", _table([*header, "weakest layer"], rows, "lrrrrrl")]
    notes = [f"- {_code(row.name)}: {_text(note)}" for row in passes for note in row.notes]
    if notes:
        lines.append("\n".join(notes))
    return "\n\n".join(lines)


def _pass(row: PassRow) -> list[str]:
    weakest = f"{_cell(row.weakest)} {row.weakest_sqnr}" if row.weakest else NOTHING
    return [
        _cell(row.name),
        f"{row.seconds} (earlier run)" if row.cached else row.seconds,
        row.metric.text,
        row.drop.text,
        row.sqnr.text,
        row.bytes,
        weakest,
    ]


def _checks(report: Report) -> str:
    rows = [
        [_cell(c.artifact), _text(c.name), _PASSED if c.ok else _FAILED, _text(c.detail)]
        for c in check_rows(report)
    ]
    if not rows:
        return ""
    return f"## Checks\n\n{_table(['artifact', 'check', '', 'detail'], rows, 'llll')}"


def _environment(report: Report) -> str:
    environment = report["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    machine = f"{environment['processor']}, {environment['cores']} cores, {environment['system']}"
    return _text(f"Measured on {machine}; Python {environment['python']}, {versions}.")


def _figure(figure: Figure) -> str:
    return f"{figure.text} ({figure.note})" if figure.note else figure.text


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Lay out a table; ``align`` has one letter a column, ``l`` or ``r``."""
    rule = ["---:" if letter == "r" else "---" for letter in align]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _text(text: str) -> str:
    """Escape what Markdown would take for markup, and keep it on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Set a name as code, whatever characters are in it."""
    flat = " ".join(text.split()) or " "
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {flat} {fence}" if longest else f"{fence}{flat}{fence}"


def _cell(text: str) -> str:
    """Set a name as code inside a table, where a bar would end the cell."""
    return _code(text).replace("|", "\\|")
