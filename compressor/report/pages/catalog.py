"""Pages of ``compress passes``, ``compress exporters`` and ``compress doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.report import formats
from compressor.report.terminal import plain_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from compressor.lab.doctor import Builder, Gpu, Machine
    from compressor.spec.describe import Description, Entry, Option


_INDENT = "  "


def overview_table(entries: Sequence[Entry]) -> Table:
    """Return the list of what there is."""
    from rich.text import Text

    needs = any(entry.needs for entry in entries)
    table = plain_table()
    for heading in ("name", "what it does", *(["needs"] if needs else [])):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        summary = Text(entry.problem, style="red") if entry.problem else Text(entry.summary)
        cells = [Text(entry.name), summary]
        table.add_row(*cells, *([Text(", ".join(entry.needs))] if needs else []))
    return table


def description_table(description: Description) -> Group:
    """Return the page of one pass or exporter."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [
        Text(description.name, style="bold"),
        Text(),
        Text(description.documentation.replace("``", "")),
    ]
    if description.needs:
        parts += [Text(), Text(f"Needs: {', '.join(description.needs)}")]
    if description.source:
        parts += [Text(), Text(f"Source: {description.source}")]
    parts += [Text(), _options(description.options) if description.options else Text("No options.")]
    return Group(*parts)


def _options(options: Sequence[Option]) -> Table:
    table = plain_table()
    for heading in ("option", "type", "default", "description"):
        table.add_column(heading, overflow="fold")
    _add(table, options, "")
    return table


def _add(table: Table, options: Sequence[Option], indent: str) -> None:
    from rich.text import Text

    for option in options:
        default = "required" if option.required else option.default or ""
        cells = (indent + option.key, option.type, default, option.description)
        table.add_row(*(Text(cell) for cell in cells))
        _add(table, option.options, indent + _INDENT)


_MISSING = "not installed"


def doctor_table(machine: Machine) -> Group:
    """Return what was found, one line for each fact."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for label, value in _facts(machine):
        table.add_row(Text(label), Text(value, style="dim" if value == _MISSING else ""))
    warnings = [Text(f"warning: {warning}", style="bold red") for warning in machine.warnings]
    return Group(table, *([Text(), *warnings] if warnings else []))


def _facts(machine: Machine) -> list[tuple[str, str]]:
    runtimes = [f"{version} ({name})" for name, version in machine.runtimes.items()]
    memory = "not known" if machine.memory is None else formats.size(machine.memory)
    return [
        ("python", machine.python),
        *((name, found or _MISSING) for name, found in machine.versions.items()),
        ("onnxruntime", ", ".join(runtimes) or _MISSING),
        ("providers built in", ", ".join(machine.providers) or "none"),
        ("GPUs", "; ".join(_gpu(gpu) for gpu in machine.gpus) or "none"),
        *((f"TensorRT builder {b.name}", _builder(b)) for b in machine.builders),
        ("system", machine.system),
        ("cores", str(machine.cores)),
        ("memory", memory),
        ("free disk here", formats.size(machine.disk_free)),
        ("processor features", ", ".join(machine.features) or "not known"),
        ("int8", machine.int8),
    ]


def _gpu(gpu: Gpu) -> str:
    return f"{gpu.name}, {formats.size(gpu.memory)}, compute capability {gpu.compute_capability}"


def _builder(builder: Builder) -> str:
    return builder.detail if builder.available else f"not available: {builder.detail}"
