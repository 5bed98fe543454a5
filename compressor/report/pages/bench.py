"""The page of ``compress bench``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compressor.report import formats
from compressor.report.terminal import label, plain_table

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_STEPS = {
    "import": "import runtime",
    "read_disk": "read, disk",
    "read_cache": "read, cached",
    "create": "open",
    "first": "first run",
    "steady": "steady",
}
_FAINT = "dim"

Result = Mapping[str, Any]


def benchmark_table(result: Result) -> Group:
    """Return the tables of latencies and cold starts, and what was not measured."""
    from rich.console import Group
    from rich.text import Text

    shapes = ", ".join(
        f"{i['name']} {i['dtype']} {formats.shape(i['shape'])}" for i in result["inputs"]
    )
    values = "random values" if result["data"] is None else result["data"]
    threads = "as many threads as it likes"
    if result["threads"] is not None:
        threads = formats.plural(result["threads"], "thread")
    parts: list[RenderableType] = [
        label(f"inputs: {shapes}; {values}"),
        label(f"{_provider(result)}, {threads}; intervals are of 95 %"),
        Text(),
        _latencies(result),
    ]
    if any(a["cold"] for a in result["artifacts"]):
        parts += [Text(), label("cold start, each step for itself; medians"), _cold(result)]
    notes = list(dict.fromkeys(_notes(result)))
    if notes:
        parts += [Text(), *(label(f"- {note}", _FAINT) for note in notes)]
    return Group(*parts)


def _provider(result: Result) -> str:
    if result["provider"] is None:
        return "each artifact in its own runtime"
    return f"provider {result['provider']}"


def _latencies(result: Result) -> Table:
    table = plain_table()
    table.add_column("artifact", overflow="fold")
    table.add_column("runtime", overflow="fold")
    for heading in ("size", "batch", "p50", "p90", "p99", "samples/s", "latency ratio"):
        table.add_column(heading, justify="right", overflow="fold")
    for artifact in result["artifacts"]:
        for i, row in enumerate(artifact["latency"] or [None]):
            first = ["", "", ""] if i else _facts(artifact)
            cells = [formats.NOTHING] * 6 if row is None else _cells(row, artifact, result)
            table.add_row(*(label(cell) for cell in (*first, *cells)))
    return table


def _facts(artifact: Result) -> list[str]:
    runtime = artifact["runtime"] or formats.NOTHING
    return [artifact["name"], runtime, formats.size(artifact["bytes"])]


def _cells(row: Result, artifact: Result, result: Result) -> list[str]:
    return [
        str(row["batch"]),
        *(formats.milliseconds(row[key]) for key in ("p50", "p90", "p99")),
        formats.short_count(row["throughput"]["value"]),
        "base" if artifact["name"] == result["base"] else _ratio(row["ratio"]),
    ]


def _ratio(ratio: Result) -> str:
    return f"{formats.ratio(ratio['value'])} ({formats.ratio_interval(ratio['ci95'])})"


def _cold(result: Result) -> Table:
    table = plain_table()
    table.add_column("artifact", overflow="fold")
    for heading in (*_STEPS.values(), "peak memory", "of it anonymous"):
        table.add_column(heading, justify="right", overflow="fold")
    for artifact in result["artifacts"]:
        cold = artifact["cold"]
        if cold is None:
            continue
        memory = cold["memory"] or {}
        cells = [_median(cold["milliseconds"][step], formats.milliseconds) for step in _STEPS]
        cells += [_median(memory.get(key), formats.size) for key in ("peak", "anonymous")]
        table.add_row(*(label(cell) for cell in (artifact["name"], *cells)))
    return table


def _median(spread: Result | None, text: Any) -> str:
    return formats.NOTHING if spread is None else str(text(spread["median"]))


def _notes(result: Result) -> Iterator[str]:
    """Say what was not measured, or not as well as it was wanted."""
    for artifact in result["artifacts"]:
        name = artifact["name"]
        if artifact["reason"]:
            yield f"{name} is not run: {artifact['reason']}"
            continue
        if artifact["runtime_reason"]:
            yield f"{name} is {artifact['runtime_reason']}: timed in {artifact['runtime']}"
        energy = artifact["energy"]
        if energy is None:
            yield f"energy not measured: {artifact['energy_reason']}"
        else:
            yield (
                f"{name}: {formats.number(energy['joules'], 3)} J for a batch of "
                f"{energy['batch']} ({energy['source']}, everything on it included)"
            )
        cold = artifact["cold"]
        if cold is not None and cold["memory"] is None:
            yield "peak memory not measured: this system does not let a process reset its peak"
        if cold is not None and cold["milliseconds"]["read_disk"] is None:
            yield "reading from disk not measured: this system does not drop cached pages"
    yield from _imprecise(result)


def _imprecise(result: Result) -> Iterator[str]:
    base: Sequence[Result] = next(
        a["latency"] for a in result["artifacts"] if a["name"] == result["base"]
    )
    if base and base[0]["inputs"] > 1:
        yield f"times are over {formats.plural(base[0]['inputs'], 'input')}, taken in turn"
    for artifact in result["artifacts"]:
        for row in artifact["latency"]:
            if row["ratio"] is None:
                continue
            low, high = row["ratio"]["ci95"]
            half = (high - low) / 2 / row["ratio"]["value"]
            if half > result["precision"]:
                yield (
                    f"{artifact['name']}, batch {row['batch']}: the ratio is known to "
                    f"±{formats.percent(100 * half)}, not to the wanted "
                    f"±{formats.percent(100 * result['precision'])}; give more --seconds, or a "
                    "quieter machine"
                )
