"""``compress doctor``."""

from __future__ import annotations

import click

from compressor.cli.options import json_option


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can do.

    Versions, ONNX Runtime's providers, TensorRT's builders, GPUs, cores, memory, free disk, and
    what the processor's features mean for int8.
    """
    from dataclasses import asdict
    from sys import stdout

    from compressor.doctor import examine
    from compressor.files import json_text
    from compressor.pages.machine import doctor_table
    from compressor.report.terminal import show

    machine = examine()
    if as_json:
        click.echo(json_text(asdict(machine)), nl=False)
    else:
        show(doctor_table(machine), stdout)
