"""The page of ``compress doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.report import formats

if TYPE_CHECKING:
    from rich.console import Group

    from compressor.doctor import Builder, Gpu, Machine

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
