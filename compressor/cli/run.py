"""Commands that run a spec: ``compress run``, ``compress plan`` and ``compress quantize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from compressor.cli.options import (
    PATH,
    force_option,
    history_option,
    json_option,
    label_option,
    near,
    print_result,
    quiet_option,
    set_option,
    shown_progress,
    spec_argument,
)

if TYPE_CHECKING:
    from compressor.run.options import RunOptions
    from compressor.spec.load import Spec


@click.command()
@spec_argument
@set_option
@click.option(
    "--fresh", is_flag=True, help="Discard the stored results of earlier runs of this spec."
)
@force_option
@json_option
@quiet_option
@history_option
@label_option
@click.option("--memory", is_flag=True, help="Also measure the peak memory of each model.")
@click.option("--strict", is_flag=True, help="Also fail if a verdict is unknown.")
def run(
    spec: Path,
    settings: tuple[str, ...],
    fresh: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    history: Path | None,
    label: str,
    memory: bool,
    strict: bool,
) -> None:
    """Compress, export, verify and report, as SPEC says.

    Reuses steps that an earlier run of the same spec finished. The result table goes to stderr;
    with --json, the whole report goes to stdout instead. Under torchrun, the processes share
    calibration batches and the shards of large checkpoints. With --history, the run is added to
    that file, and the report plots the metric from run to run.
    """
    from compressor.front.spec import checked
    from compressor.run.options import RunOptions

    options = RunOptions(
        fresh=fresh, force=force, history=history, label=label, memory=memory, strict=strict
    )
    code = run_and_show(checked(spec, settings), options, as_json=as_json, quiet=quiet)
    raise click.exceptions.Exit(code)


@click.command()
@spec_argument
@set_option
@force_option
@json_option
@click.option(
    "--layers", is_flag=True, help="List every layer instead of grouping layers of one kind."
)
def plan(spec: Path, settings: tuple[str, ...], force: bool, as_json: bool, layers: bool) -> None:
    """Check SPEC from end to end, and show what a run will do.

    Shows for each kind of layer what happens to it, its bytes before and after, and why. No heavy
    work is done. The graph of a PyTorch module is stored for the run.
    """
    from shutil import get_terminal_size
    from sys import stdout

    from compressor.report.pages.plan import NARROW, plan_json, plan_page
    from compressor.report.result import check_free
    from compressor.run.plan import make_plan
    from compressor.spec.load import load_spec
    from compressor.spec.user_code import importable

    with importable([Path.cwd()]), shown_progress() as progress, progress.stage("plan"):
        loaded = load_spec(spec, settings)
        check_free(loaded.output, force=force)
        made = make_plan(loaded)
        made.model.keep_graph(progress.note)
    width = max(NARROW, get_terminal_size().columns) if stdout.isatty() else NARROW
    print_result(
        lambda: plan_json(made),
        lambda: plan_page(made, every_layer=layers, width=width),
        as_json=as_json,
    )


def run_and_show(spec: Spec, options: RunOptions, *, as_json: bool, quiet: bool) -> int:
    """Run a spec, print its results and return the exit code.

    Of the processes that ``torchrun`` starts, the first alone prints.
    """
    from sys import stderr

    from compressor.files import json_text
    from compressor.front.run import run
    from compressor.report.terminal import reason_line, run_page, show
    from compressor.run.execute import help_run
    from compressor.run.ranks import ranks

    with (
        ranks() as group,
        shown_progress(enabled=not quiet and group.rank == 0, lines=not as_json) as progress,
    ):
        options = replace(options, ranks=group)
        if group.rank:
            help_run(spec, options)
            return 0
        result = run(spec, options, progress=progress)
    if as_json:
        click.echo(json_text(result.report), nl=False)
    elif not quiet:
        if result.cached:
            click.echo("Nothing has changed: these are the results of an earlier run.", err=True)
        path = spec.document.path
        named = str(path) if path.is_file() else None  # a command may have made it up
        show(run_page(result.report, str(near(result.output)), named), stderr)
    elif result.exit_code:
        click.echo(reason_line(result.report, str(near(result.output))), err=True)
    return int(result.exit_code)


_FORMATS = ("compressed-tensors", "gptq", "awq", "gguf", "genai")
_CONSUMERS = ("transformers", "vllm", "vllm-cpu", "llama.cpp", "genai")
_PRESETS = (
    *("int8", "int4-g128", "int4-g32", "int2-g32", "fp8", "nvfp4", "mxfp4"),
    *("int8-w8a8", "int8-w8a8-static", "fp8-w8a8", "fp8-w8a8-static", "nvfp4-w4a4", "mxfp4-w4a4"),
)


@click.command()
@click.argument("checkpoint", type=PATH)
@click.option("-o", "--output", required=True, type=PATH, help="The new directory.")
@click.option(
    "--preset",
    type=click.Choice(_PRESETS),
    help="Bits per weight, and how many weights share a scale; presets with two numbers also "
    "round activations. Default: int4-g128; int4-g32 for "
    "gguf, genai, and where 128 divides the widths of few layers.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(_FORMATS),
    help="A directory for transformers and vLLM (the default), a directory in the layout of GPTQ "
    "or AWQ, one file for llama.cpp, or an ONNX graph with a cache for onnxruntime-genai.",
)
@click.option(
    "--for",
    "consumer",
    type=click.Choice(_CONSUMERS),
    help="Program that will load the result; layers for which it has no kernels are refused.",
)
@click.option(
    "--method",
    type=click.Choice(("rtn", "hqq", "gptq", "awq", "reconstruct")),
    default="rtn",
    show_default=True,
    help="Round to nearest, half-quadratic, or GPTQ, AWQ, or codes trained from GPTQ's, which read "
    "--text.",
)
@click.option(
    "--text",
    type=PATH,
    help="UTF-8 text that calibrates --method gptq, awq and reconstruct, and stored scales of "
    "activations and caches.",
)
@click.option(
    "--eval",
    "evaluation",
    type=PATH,
    help="UTF-8 text that judges the result, by perplexity and KL divergence.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Number of pieces of --text to read.",
)
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens per piece; default: 512, or the model's number of positions if that is less.",
)
@click.option(
    "--range",
    "search",
    type=click.Choice(("min-max", "mse")),
    help="Span all values, or search for the range with the least squared error.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="PATTERN",
    help="Leave layers with this name unchanged; * and ? are wildcards. May be repeated.",
)
@click.option(
    "--smooth",
    is_flag=True,
    help="Scale channels, calibrated on --text, so that rounded activations lose less.",
)
@click.option(
    "--kv-cache",
    "cache",
    type=click.Choice(("fp8", "int8", "int4")),
    help="Store scales for the keys and values that attention keeps, found on --text: fp8 for the "
    "default format, int8 or int4 for genai.",
)
@click.option("--embeddings", is_flag=True, help="Also quantize embeddings and the output layer.")
@click.option(
    "--max-shard-size",
    type=int,
    metavar="BYTES",
    help="Largest size of a file; default: the input's shards.",
)
@click.option("--no-check", is_flag=True, help="Do not check the result in transformers.")
@click.option("--fresh", is_flag=True, help="Discard the stored results of an earlier call.")
@force_option
@json_option
@quiet_option
def quantize(
    checkpoint: Path,
    output: Path,
    preset: str | None,
    output_format: Literal["compressed-tensors", "gptq", "awq", "gguf", "genai"] | None,
    consumer: str | None,
    method: str,
    search: str | None,
    text: Path | None,
    samples: int,
    length: int | None,
    evaluation: Path | None,
    skip: tuple[str, ...],
    smooth: bool,
    cache: Literal["fp8", "int8", "int4"] | None,
    embeddings: bool,
    max_shard_size: int | None,
    no_check: bool,
    fresh: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Quantize the weights of CHECKPOINT, however large it is.

    CHECKPOINT is a safetensors file, a sharded directory, or a Hugging Face directory. Tensors are
    streamed one at a time from memory-mapped files. The new directory has the compressed-tensors
    layout, which transformers and vLLM load directly. --format gguf writes model.gguf for
    llama.cpp, with configuration and tokenizer; --format genai writes a folder from which
    onnxruntime-genai generates text. Layers that transformers does not read as codes stay float.
    The result is proved: every tensor has its place in the model's class, and the outputs of a
    model of up to 1 GiB are those of the dequantized weights. --method gptq, awq and reconstruct
    run a causal language model on text, block by block; memory holds one block. --eval judges the
    result and the float model; without it, the report states no accuracy. A killed command resumes
    when it is run again. Under torchrun, the processes share the shards.
    """
    from compressor.lab.quantizing import QuantizeOptions, in_terms_of_options, quantization_spec
    from compressor.run.options import RunOptions

    options = QuantizeOptions(
        preset=preset,
        method=method,
        range=search,
        skip=skip,
        embeddings=embeddings,
        max_shard_size=max_shard_size,
        text=text,
        samples=samples,
        length=length,
        evaluation=evaluation,
        format=output_format,
        consumer=consumer,
        smooth=smooth,
        cache=cache,
    )
    with in_terms_of_options(options):
        code = run_and_show(
            quantization_spec(checkpoint, output, options),
            RunOptions(fresh=fresh, force=force, identify_by_headers=True, proves=not no_check),
            as_json=as_json,
            quiet=quiet,
        )
    raise click.exceptions.Exit(code)
