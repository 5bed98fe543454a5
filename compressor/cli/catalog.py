"""Commands that describe: ``passes``, ``exporters``, ``schema``, ``doctor`` and ``init``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from compressor.cli.options import PATH, json_option, print_result
from compressor.errors import argument


def _named(kind: Literal["pass", "exporter"]) -> Callable[..., list[str]]:
    """Return what completes a name in a shell."""

    def complete(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[str]:
        from compressor import catalog

        return [name for name in catalog.names(kind) if name.startswith(incomplete)]

    return complete


@click.command()
@click.argument("name", required=False, shell_complete=_named("pass"))
@json_option
def passes(name: str | None, as_json: bool) -> None:
    """List the passes, or describe one.

    With NAME: its documentation, source, needs and options.
    """
    _show("pass", name, as_json=as_json)


@click.command()
@click.argument("name", required=False, shell_complete=_named("exporter"))
@json_option
def exporters(name: str | None, as_json: bool) -> None:
    """List the artifact formats, or describe one.

    With NAME: its documentation and options.
    """
    _show("exporter", name, as_json=as_json)


def _show(kind: Literal["pass", "exporter"], name: str | None, *, as_json: bool) -> None:
    from dataclasses import asdict

    from compressor.report.pages.catalog import description_page, overview_page
    from compressor.spec.describe import describe, overview

    if name is None:
        entries = overview(kind)
        print_result(
            lambda: [asdict(entry) for entry in entries],
            lambda: overview_page(entries),
            as_json=as_json,
        )
        return
    description = describe(kind, name)
    print_result(
        lambda: asdict(description), lambda: description_page(description), as_json=as_json
    )


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec.

    Editors use it to complete and check specs. Specs from compress init begin with a line that
    names the schema in the package. For passes of other packages, and for specs without that line,
    save the output as spec.schema.json and begin the spec with

        # yaml-language-server: $schema=spec.schema.json
    """
    from compressor.files import json_text
    from compressor.spec.schema import spec_schema

    click.echo(json_text(spec_schema()), nl=False)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what this machine can do.

    Versions, ONNX Runtime's providers, TensorRT's builders, GPUs, cores, memory, free disk, and
    what the processor's features mean for int8.
    """
    from dataclasses import asdict

    from compressor.lab.doctor import examine
    from compressor.report.pages.catalog import doctor_page

    machine = examine()
    print_result(lambda: asdict(machine), lambda: doctor_page(machine), as_json=as_json)


@click.command()
@click.argument("model", type=PATH)
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=Path("spec.yaml"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--data",
    type=PATH,
    help="A folder of images, WAV files, npz files (a sample each) or npy files, or a file: .npz, "
    ".npy, .safetensors, .txt or .jsonl. Default: the folder beside MODEL, if it is the only one "
    "with class folders of images, or WAV files.",
)
@click.option("--target", metavar="NAME", help="Where the ONNX file will run, such as ort-cpu.")
@click.option("--metric", metavar="NAME", help="What is measured: a name, or package.module:fn.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing, even at a terminal.")
def init(
    model: Path,
    output: Path,
    data: Path | None,
    target: str | None,
    metric: str | None,
    yes: bool,
) -> None:
    """Write a commented starter spec for MODEL.

    MODEL is an ONNX file, or a checkpoint: a .pt, .pth or .safetensors file, or a folder of
    safetensors. The passes depend on the content of an ONNX file, or on the purpose of a folder of
    transformers; an encoder of text needs only lines of text. Where arrays need a transform, the
    command writes it into a file beside the spec. No file is overwritten. At a terminal, the
    command asks for data, target and metric unless they are set.
    """
    from compressor.lab.starter import write_starter
    from compressor.lab.starter_arrays import code_of
    from compressor.lab.starter_data import Choices, questions

    choices = Choices(data, target, metric)
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        for question in questions(model, choices):
            kind = click.Choice(question.allowed) if question.allowed else str
            answer = click.prompt(question.text, default=question.default, type=kind, err=True)
            choices = choices.with_answer(question.key, answer)
    rest = "fill it in" if write_starter(model, output, choices) else "check it"
    code = code_of(output)
    files = [output, code] if f"{code.stem}:" in output.read_text(encoding="utf-8") else [output]
    for file in files:
        lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
        for line in dict.fromkeys(line for line in lines if "CHECK" in line):
            click.echo(f"{file}: {line}", err=True)
    click.echo(
        f"wrote {' and '.join(map(str, files))}; {rest}, then: compress plan {argument(output)}",
        err=True,
    )
