"""The page of ``compress bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compressor.report import formats
from compressor.report.page import GAP, Block, Page, Table, bullets, left, line, right

_STEPS = {
    "import": "import runtime",
    "read_disk": "read, disk",
    "read_cache": "read, cached",
    "create": "open",
    "first": "first run",
    "steady": "steady",
}

_BUSY = 0.2  # share of the time from which on single latencies say more about other work

Result = Mapping[str, Any]


def benchmark_page(result: Result) -> Page:
    """Return the tables of latencies and cold starts, and what was not measured."""
    shapes = ", ".join(
        f"{i['name']} {i['dtype']} {formats.shape(i['shape'])}" for i in result["inputs"]
    )
    values = "random values" if result["data"] is None else result["data"]
    provider = "each artifact in its own runtime"
    if result["provider"] is not None:
        provider = f"provider {result['provider']}"
    threads = formats.plural(result["threads"], "thread")
    page: list[Block] = [
        line(f"inputs: {shapes}; {values}"),
        *([line(f"on {result['device']}")] if result.get("device") else []),
        line(f"{provider}, {threads}; intervals are of 95 %"),
        GAP,
        _latencies(result),
    ]
    if any(a["cold"] for a in result["artifacts"]):
        page += [GAP, line("cold start, each step timed separately; medians"), _cold(result)]
    notes = bullets(dict.fromkeys(_notes(result)))
    return [*page, *([GAP, *notes] if notes else [])]


def _latencies(result: Result) -> Table:
    headings = ("size", "batch", "p50", "p90", "p99", "samples/s", "latency ratio")
    rows = []
    for artifact in result["artifacts"]:
        runtime = artifact["runtime"] or formats.NOTHING
        facts = [artifact["name"], runtime, formats.size(artifact["bytes"])]
        if not artifact["latency"]:
            rows.append([*facts, *[formats.NOTHING] * 6])
        for row in artifact["latency"]:
            ratio = "base"
            if artifact["name"] != result["base"]:
                interval = formats.ratio_interval(row["ratio"]["ci95"])
                ratio = f"{formats.ratio(row['ratio']['value'])} ({interval})"
            times = [formats.milliseconds(row[key]) for key in ("p50", "p90", "p99")]
            throughput = formats.short_count(row["throughput"]["value"])
            rows.append([*facts, str(row["batch"]), *times, throughput, ratio])
            facts = ["", "", ""]
    return Table([*left("artifact", "runtime"), *right(*headings)], rows)


def _cold(result: Result) -> Table:
    rows = []
    for artifact in result["artifacts"]:
        cold = artifact["cold"]
        if cold is None:
            continue
        memory = cold["memory"] or {}
        steps = [_median(cold["milliseconds"][step], formats.milliseconds) for step in _STEPS]
        peaks = [_median(memory.get(key), formats.size) for key in ("peak", "anonymous")]
        rows.append([artifact["name"], *steps, *peaks])
    headings = right(*_STEPS.values(), "peak memory", "anonymous part")
    return Table([*left("artifact"), *headings], rows)


def _median(spread: Result | None, text: Callable[[float], str]) -> str:
    return formats.NOTHING if spread is None else text(spread["median"])


def _notes(result: Result) -> Iterator[str]:
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
    ratios = [row["ratio"] for a in result["artifacts"] for row in a["latency"] if row["ratio"]]
    if base and (base[0]["waiting"] or 0.0) > _BUSY:
        wall = any(ratio["clock"] == "wall" for ratio in ratios)
        advice = "" if wall else ": rely on the ratios, which use processor time"
        yield (
            f"other work had the processor for {100 * base[0]['waiting']:.0f} % of the "
            f"time (load average {formats.number(base[0]['load'], 3)}){advice}"
        )
    for artifact in result["artifacts"]:
        for row in artifact["latency"]:
            if row["ratio"] is None:
                continue
            if row["ratio"]["clock"] == "wall":
                yield (
                    "ratios are of the wall time, since several threads or a GPU compute: they "
                    "need a quiet machine"
                )
            low, high = row["ratio"]["ci95"]
            half = (high - low) / 2 / row["ratio"]["value"]
            if half > result["precision"]:
                yield (
                    f"{artifact['name']}, batch {row['batch']}: the ratio is measured to "
                    f"±{formats.percent(100 * half)}, not to the requested "
                    f"±{formats.percent(100 * result['precision'])}; give more --seconds, or a "
                    "quieter machine"
                )
