"""``compress init``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("spec.yaml"),
    show_default=True,
    help="The file to write.",
)
def init(model: Path, output: Path) -> None:
    """Write a commented starter spec for MODEL.

    MODEL is an ONNX file, or a checkpoint: a .pt, .pth or .safetensors file, or a folder of
    safetensors. No file is overwritten.
    """
    from compressor.starter import write_starter

    write_starter(model, output)
    click.echo(f"wrote {output}; fill it in, then: compress plan {output}", err=True)
