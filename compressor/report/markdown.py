"""The report as Markdown, short enough for a pull request."""

from __future__ import annotations

from compressor.report.formats import (
    FAILED,
    NOTHING,
    PASSED,
    cell,
    code,
    count,
    short_count,
    table,
    text,
)
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


def markdown_report(report: Report) -> str:
    """Render a report for a pull request, in GitHub's Markdown.

    The verdict and one table are seen; the rest is folded up.

    Args:
        report: the content of ``report.json``.
    """
    folded = [_limits(report), _passes(report), _checks(report), _environment(report)]
    titles = ("limits", "passes", "checks", "environment")
    named = ", ".join(title for title, section in zip(titles, folded, strict=True) if section)
    sections = [
        _verdict(report),
        _models(report),
        f"<details>\n<summary>{named.capitalize()}</summary>",
        *(section for section in folded if section),
        "</details>",
    ]
    return "\n\n".join(sections) + "\n"


def _verdict(report: Report) -> str:
    mark = PASSED if report["ok"] else FAILED
    lines = [f"# {text(report['name'])}", f"**{mark} {text(headline(report))}**"]
    lost = failures(report)
    if lost:
        lines.append("\n".join(f"- {code(artifact)}: {text(what)}" for artifact, what in lost))
    artifact = main_artifact(report)
    if artifact is not None:
        lines.append(f"{code(artifact['path'])}: {text(gist(report))}.")
    return "\n\n".join(lines)


def _models(report: Report) -> str:
    name = text(metric_name(report))
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
    lines = [table(header, rows, "lrrrrrr")]
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
        lines.append("\n".join(f"- {text(reason)}" for reason in reasons))
    return "\n\n".join(lines)


def _model(row: ModelRow) -> list[str]:
    name = row.name if row.ok is None else f"{PASSED if row.ok else FAILED} {cell(row.name)}"
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
            text(row.name),
            cell(row.artifact),
            row.measured,
            row.limit,
            f"{PASSED if row.ok else FAILED} {row.note}".rstrip(),
        ]
        for row in limit_rows(report)
    ]
    if not rows:
        return ""
    laid_out = table(["limit", "artifact", "measured", "at most", ""], rows, "llrrl")
    return f"## Limits\n\n{laid_out}"


def _passes(report: Report) -> str:
    passes = pass_rows(report)
    if not passes:
        return ""
    header = ["pass", "time", f"{text(metric_name(report))} after", "drop", "SQNR", "bytes"]
    rows = [_pass(row) for row in passes]
    lines = ["## Passes", table([*header, "weakest layer"], rows, "lrrrrrl")]
    notes = [f"- {code(row.name)}: {text(note)}" for row in passes for note in row.notes]
    if notes:
        lines.append("\n".join(notes))
    return "\n\n".join(lines)


def _pass(row: PassRow) -> list[str]:
    weakest = f"{cell(row.weakest)} {row.weakest_sqnr}" if row.weakest else NOTHING
    return [
        cell(row.name),
        f"{row.seconds} (earlier run)" if row.cached else row.seconds,
        row.metric.text,
        row.drop.text,
        row.sqnr.text,
        row.bytes,
        weakest,
    ]


def _checks(report: Report) -> str:
    rows = [
        [cell(c.artifact), text(c.name), PASSED if c.ok else FAILED, text(c.detail)]
        for c in check_rows(report)
    ]
    if not rows:
        return ""
    return f"## Checks\n\n{table(['artifact', 'check', '', 'detail'], rows, 'llll')}"


def _environment(report: Report) -> str:
    environment = report["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    machine = f"{environment['processor']}, {environment['cores']} cores, {environment['system']}"
    return text(f"Measured on {machine}; Python {environment['python']}, {versions}.")


def _figure(figure: Figure) -> str:
    return f"{figure.text} ({figure.note})" if figure.note else figure.text
