"""The pages of ``compress inspect`` and ``compress verify``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any

from compressor.lab.inspect.contents import (
    Contents,
    EngineContents,
    GraphFacts,
    ModelContents,
    RunContents,
)
from compressor.lab.verify.files import FileState
from compressor.lab.verify.verify import Proof
from compressor.report import formats
from compressor.report.page import (
    GAP,
    Block,
    Cell,
    Entry,
    Line,
    Page,
    Table,
    bullets,
    left,
    line,
    right,
)
from compressor.report.terminal import run_page

_LONGEST = 80  # characters of a value of metadata, such as a chat template, or of a tensor's name


def contents_page(contents: Contents) -> Page:
    """Return everything that an inspection found."""
    if isinstance(contents, EngineContents):
        return _engine(contents)
    return _run(contents) if isinstance(contents, RunContents) else _model(contents)


def _model(contents: ModelContents) -> Page:
    lines = [line(f"{contents.kind} {contents.path}", "strong"), _files(contents.files)]
    if contents.graph is not None:
        lines += map(line, _graph(contents.graph))
    if contents.quantization:
        lines.append(line(f"quantization: {contents.quantization}"))
    parts = [
        formats.plural(len(contents.tensors), "tensor"),
        formats.plural(contents.parameters, "parameter"),
    ]
    if contents.zeros is not None:
        parts[-1] += f" ({formats.percent(contents.zeros)} zeros)"
    if contents.graph is not None and contents.graph.macs is not None:
        parts.append(f"{formats.short_count(contents.graph.macs)} MACs")
    sizes = [f"{dtype} {formats.size(size)}" for dtype, size in contents.bytes_by_dtype.items()]
    parts.append(f"{formats.size(contents.bytes)} ({', '.join(sizes)})")
    total = line("Total: " + ", ".join(parts), "strong")
    about: list[Block] = [GAP, _metadata(contents.metadata)] if contents.metadata else []
    return [*lines, *about, GAP, _tensors(contents), GAP, total, *bullets(contents.notes, "bad")]


def _metadata(metadata: Mapping[str, Any]) -> Table:
    rows: list[list[Entry]] = [[key, _cut(value)] for key, value in metadata.items()]
    return Table(left("metadata", "value"), rows)


def _cut(value: object) -> str:
    """Return the first words of a value; of a word that is longer, its two ends."""
    words = " ".join(str(value).split())
    if len(words) <= _LONGEST:
        return words
    short = shorten(words, _LONGEST, placeholder=" …")
    half = _LONGEST // 2
    return short if len(short) > half else f"{words[: half - 1]}…{words[-half:]}"


def _files(sizes: Mapping[str, int]) -> Line:
    return line(f"files: {', '.join(f'{name} {formats.size(n)}' for name, n in sizes.items())}")


def _graph(graph: GraphFacts) -> list[str]:
    lines = [f"opset: {_pairs(graph.opsets)}"] if graph.opsets else []
    lines += [
        f"inputs: {_listed(graph.inputs)}",
        f"outputs: {_listed(graph.outputs)}",
        f"operators: {_pairs(graph.operators) or 'none'}",
    ]
    if graph.producer:
        lines.append(f"written by: {graph.producer}")
    if graph.metadata:
        lines.append(f"metadata: {', '.join(f'{k}={_cut(v)}' for k, v in graph.metadata.items())}")
    return lines


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items)) or "none"


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _tensors(contents: ModelContents) -> Table:
    headings = (*left("tensor", "shape", "dtype"), *right("size", "zeros", "MACs"))
    rows = [
        [
            _cut(row.name),
            formats.shape(row.shape),
            row.dtype,
            formats.size(row.bytes),
            formats.NOTHING if row.zeros is None else formats.percent(row.zeros),
            formats.NOTHING if row.macs is None else formats.short_count(row.macs),
            row.quantization,
            row.storage,
        ]
        for row in contents.tensors
    ]
    content = Table([*headings, *left("quantization", "stored as")], rows)
    coded = any(row.quantization for row in contents.tensors)
    stored = any(row.storage for row in contents.tensors)
    costs = contents.graph is not None and contents.graph.macs is not None
    return content.picked([*[True] * 5, costs, coded, stored])


def _run(contents: RunContents) -> Page:
    versions = _pairs(contents.versions)
    page: list[Block] = [
        line(f"run {contents.name} in {contents.path}", "strong"),
        line(f"seed {contents.seed}; {versions}"),
        GAP,
    ]
    if contents.report is None:
        page.append(line("report.json is not what the run wrote; it is not shown", "bad"))
    else:
        page += run_page(contents.report)
    rows = [_compared(file) for file in contents.files]
    return [*page, GAP, Table([*left("file"), *right("size"), *left("since the run")], rows)]


def _engine(contents: EngineContents) -> Page:
    manifest = contents.manifest
    targets = _listed(manifest.get("compute_capabilities") or ("not named",))
    lines = [
        line(f"TensorRT engine {contents.path}", "strong"),
        _files(contents.files),
        line(f"built by: {manifest.get('builder')} ({_pairs(manifest['versions'])})"),
        line(f"compute capabilities: {targets}"),
        line(f"inputs: {_listed(manifest.get('inputs', ()))}"),
        line(f"outputs: {_listed(manifest.get('outputs', ()))}"),
    ]
    for name, profile in manifest["profiles"].items():
        shapes = [f"{word} {formats.shape(profile[word])}" for word in ("min", "opt", "max")]
        lines.append(line(f"profile of {name}: {', '.join(shapes)}"))
    rows = []
    for row in manifest["layers"]:
        names = [", ".join(row[key]) for key in ("inputs", "constants", "outputs")]
        rows.append([row["name"], row["type"], row["precision"] or formats.NOTHING, *names])
    layers = Table(left("layer", "type", "precision", "reads", "constants", "gives"), rows)
    page: list[Block] = [*lines, GAP, layers, GAP, line(_engine_total(manifest), "strong")]
    if not contents.intact:
        page += bullets(["the engine does not match this manifest"], "bad")
    return page


def _engine_total(manifest: Mapping[str, Any]) -> str:
    counted = Counter(row["precision"] for row in manifest["layers"] if row["precision"])
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
    total = f"Total: {formats.plural(len(manifest['layers']), 'layer')} ({kinds})"
    meant = [row for row in manifest["quantized"] if row["meant"]]
    if meant:
        kept = sum(row["meant"] == row["computed"] for row in meant)
        total += f", {kept} of {len(meant)} quantized layers computed with codes"
    return total


def _compared(file: FileState) -> list[Entry]:
    """Return a file's name, its size, and whether it is as it was written."""
    size = formats.NOTHING if file.bytes is None else formats.size(file.bytes)
    return [file.name, size, Cell(file.state, style="" if file.state == "unchanged" else "bad")]


def proof_page(proof: Proof) -> Page:
    """Return what was compared, and what is not as it was written."""
    rows = [[*_compared(file), file.detail] for file in proof.files]
    wrong = sum(file.state != "unchanged" for file in proof.files)
    files = formats.plural(len(proof.files), "file")
    verdict = (
        line(f"{wrong} of {files} not as written", "bad")
        if wrong
        else line(f"{files}, every byte unchanged", "good")
    )
    signer = () if proof.key is None else (line(f"signed by the key {proof.key}"),)
    return [
        line(f"{proof.kind} {proof.path}", "strong"),
        line(f"compared with {proof.by}"),
        *signer,
        GAP,
        Table([*left("file"), *right("size"), *left("state", "damaged")], rows),
        GAP,
        verdict,
    ]
