"""Writes docs/zoo.md from the results of a run, and keeps them: python -m tests.zoo.page"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from tests.paths import ROOT
from tests.zoo.judge import PEERS, Verdict, judge

PAGE = ROOT / "docs" / "zoo.md"
KINDS = {
    "network": "PyTorch networks",
    "directory": "directories of `transformers`",
    "file": "ONNX files",
}
OURS = ("plan", "export", "reload", "fuse", "static", "dynamic", "prune", "directory")
SHOWN = (*OURS, *PEERS)
TITLES = {
    "plan": "`compress plan`",
    "export": "export",
    "reload": "reload",
    "fuse": "`fuse`",
    "static": "`quantize-static`",
    "dynamic": "`quantize-dynamic`",
    "prune": "`prune-structured`",
    "directory": "`compress quantize`",
    "ort_static": "ORT static",
    "ort_dynamic": "ORT dynamic",
    "torch_pruning": "Torch-Pruning",
}
_INTRO = Path(__file__).with_name("page.md")


def heading(kind: str) -> str:
    """Return the title of a kind's part."""
    return KINDS[kind][0].upper() + KINDS[kind][1:]


def text(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    counts = Counter(line["kind"] for line in results)
    kinds = ", ".join(f"{counts[kind]} {title}" for kind, title in KINDS.items() if counts[kind])
    dates = sorted(line["date"] for line in results)
    parts = [
        _INTRO.read_text(encoding="utf-8").format(
            count=len(results), kinds=kinds, first=dates[0], last=dates[-1]
        ),
        "## Summary\n\nCells that are ok, refused and wrong; the median of those with a number.\n",
        *(summary(kind, results) for kind in KINDS if counts[kind]),
        latencies(results),
        problems(results),
        *(details(kind, results) for kind in KINDS if counts[kind]),
    ]
    return "\n".join(part for part in parts if part)


def verdicts(line: Mapping[str, Any]) -> dict[str, Verdict]:
    """Return the verdict of each cell; all are wrong if the source could not be made."""
    return {name: judge(name, line["cells"]) for name in SHOWN if name in line["cells"]}


def summary(kind: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts of a kind's cells."""
    by_cell: dict[str, list[Verdict]] = defaultdict(list)
    for line in results:
        if line["kind"] == kind:
            for name, verdict in verdicts(line).items():
                by_cell[name].append(verdict)
    rows = []
    for name in SHOWN:
        if name not in by_cell:
            continue
        states = Counter(v.state for v in by_cell[name])
        numbers = [v.db for v in by_cell[name] if v.db is not None]
        middle = f"{median(numbers):.1f}" if numbers else ""
        rows.append([TITLES[name], *(states[s] for s in ("ok", "refused", "wrong")), middle])
    ours = [v for name in OURS for v in by_cell[name] if v.state != "none"]
    handled = sum(v.state != "wrong" for v in ours) / len(ours) if ours else 1.0
    return (
        f"### {heading(kind)}\n\n{table(['cell', 'ok', 'refused', 'wrong', 'median dB'], rows)}\n"
        f"{handled:.1%} of the cells of `compressor` are handled or refused with a reason.\n"
    )


def latencies(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the latency of int8 files as a share of the source's."""
    rows, logs = [], []
    timed = [line for line in results if "ratio" in line["cells"].get("latency", {})]
    for line in timed:
        ratio = line["cells"]["latency"]["ratio"]
        low, high = ratio["ci95"]
        logs.append(log(ratio["value"]))
        clock = "processor" if ratio["clock"] == "cpu" else "wall"
        where = line.get("processor", "not noted")
        rows.append(
            [line["case"], f"{ratio['value']:.2f}", f"{low:.2f} to {high:.2f}", clock, where]
        )
    if not rows:
        return ""
    head = ["file", "int8 / float", "95 % interval", "clock", "CPU"]
    slower = sum(line["cells"]["latency"]["ratio"]["ci95"][0] > 1 for line in timed)
    return (
        "## Latency of the ONNX files\n\n`fuse` and `quantize-static` by default, beside the source"
        ", in ONNX Runtime on one thread, in turn; the time on the processor.\n\n"
        f"{table(head, rows)}\nGeometric mean: {exp(sum(logs) / len(logs)):.3f}. Of {len(rows)}"
        f" files, {slower} are slower in int8 beyond the interval. One file is for x86 CPUs with"
        " and without VNNI; on those without it, int8 gains less. Small networks, in which calling"
        " integer kernels takes longer than their products, stay floats, and take as long as"
        " those.\n"
    )


def problems(results: Sequence[Mapping[str, Any]]) -> str:
    """Return what was wrong and what was refused, each reason with its cases."""
    parts = []
    for state, title in (("wrong", "Wrong"), ("refused", "Refused")):
        reasons: dict[str, list[str]] = defaultdict(list)
        for line in results:
            for name, verdict in verdicts(line).items():
                if name in OURS and verdict.state == state:
                    reasons[verdict.reason].append(f"{line['case']} ({name})")
        listed = sorted(reasons.items(), key=lambda item: -len(item[1]))
        items = [f"- {_plain(reason)} — {', '.join(cases)}" for reason, cases in listed]
        parts.append(f"## {title}\n\n" + ("\n".join(items) if items else "Nothing.") + "\n")
    return "\n".join(parts)


def details(kind: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each case of a kind."""
    lines = [line for line in results if line["kind"] == kind]
    names = [n for n in SHOWN if any(n in line["cells"] for line in lines)]
    rows = [
        [line["case"], *(mark(n, v.get(n, Verdict("none"))) for n in names)]
        for line in lines
        for v in (verdicts(line),)
    ]
    return f"## {heading(kind)}\n\n{table(['case', *(TITLES[n] for n in names)], rows)}"


def mark(name: str, verdict: Verdict) -> str:
    """Return a cell's text."""
    if verdict.state == "none":
        return ""
    if name in PEERS and verdict.state != "ok":
        return "x" if verdict.db is None else f"x {verdict.db:g}"
    letter = {"ok": "", "refused": "r", "wrong": "W"}[verdict.state]
    number = "" if verdict.db is None else f"{verdict.db:g}"
    return f"{letter} {number} {verdict.note}".strip() or "ok"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _plain(reason: str) -> str:
    """Return a reason without what Markdown would read as its own."""
    short = " ".join(reason.split())[:300]
    short = re.sub(r"^compress (\w+): ", r"\1: ", short)  # code that begins so is a command
    return "`" + short.replace("`", "'") + "`"


def main() -> None:
    from tests.zoo.run import keep, results

    keep()
    lines = [line for line in results().values() if "plan" in line["cells"]]
    for line in results().values():
        if line not in lines:
            print(f"{line['case']} could not be made here: {line['cells']}")
    PAGE.write_text(text(lines), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
