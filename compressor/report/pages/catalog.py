"""Pages of ``compress passes``, ``compress exporters`` and ``compress doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compressor.lab.doctor import Builder, Machine
from compressor.report import formats
from compressor.report.page import GAP, Block, Cell, Page, Table, left, line
from compressor.spec.describe import Description, Entry, Option

_INDENT = "  "
_MISSING = "not installed"


def overview_page(entries: Sequence[Entry]) -> Page:
    """Return the list of all passes or exporters."""
    rows: list[list[str | Cell]] = [
        [e.name, Cell(e.problem, style="bad") if e.problem else e.summary, ", ".join(e.needs)]
        for e in entries
    ]
    content = Table(left("name", "what it does", "needs"), rows)
    return [content.picked([True, True, any(entry.needs for entry in entries)])]


def description_page(description: Description) -> Page:
    """Return the page of one pass or exporter."""
    documentation = description.documentation.replace("``", "").splitlines()
    page: list[Block] = [line(description.name, "strong"), GAP, *map(line, documentation)]
    if description.needs:
        page += [GAP, line(f"Needs: {', '.join(description.needs)}")]
    if description.source:
        page += [GAP, line(f"Source: {description.source}")]
    rows = list(_options(description.options, ""))
    options = Table(left("option", "type", "default", "description"), rows)
    return [*page, GAP, options if rows else line("No options.")]


def _options(options: Sequence[Option], indent: str) -> Iterator[list[str]]:
    for option in options:
        default = "required" if option.required else option.default or ""
        yield [indent + option.key, option.type, default, option.description]
        yield from _options(option.options, indent + _INDENT)


def doctor_page(machine: Machine) -> Page:
    """Return what the machine has, one line for each fact."""
    runtimes = [f"{version} ({name})" for name, version in machine.runtimes.items()]
    gpus = [
        f"{gpu.name}, {formats.size(gpu.memory)}, compute capability {gpu.compute_capability}"
        for gpu in machine.gpus
    ]
    facts = [
        ("python", machine.python),
        *((name, version or _MISSING) for name, version in machine.versions.items()),
        ("onnxruntime", ", ".join(runtimes) or _MISSING),
        ("providers built in", ", ".join(machine.providers) or "none"),
        ("GPUs", "; ".join(gpus) or "none"),
        *((f"TensorRT builder {b.name}", _builder(b)) for b in machine.builders),
        ("system", machine.system),
        ("cores", str(machine.cores)),
        ("memory", "not known" if machine.memory is None else formats.size(machine.memory)),
        ("free disk here", formats.size(machine.disk_free)),
        *((f"extra {name}", _extra(name, lacks)) for name, lacks in machine.extras.items()),
        ("processor features", ", ".join(machine.features) or "not known"),
        ("int8", machine.int8),
    ]
    rows: list[list[str | Cell]] = [
        [name, Cell(v, style="faint" if v == _MISSING else "")] for name, v in facts
    ]
    warnings = [line(f"warning: {warning}", "bad") for warning in machine.warnings]
    return [Table(left("", ""), rows), *([GAP, *warnings] if warnings else [])]


def _extra(name: str, lacks: Sequence[str]) -> str:
    return f'{_MISSING} ({", ".join(lacks)}): pip install "compressor[{name}]"'


def _builder(builder: Builder) -> str:
    return builder.detail if builder.available else f"not available: {builder.detail}"
