"""``compress quantize``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import force_option, json_option

_PRESETS = ("int8", "int4-g128", "int4-g32", "int2-g32", "fp8", "nvfp4", "mxfp4")


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The new directory.",
)
@click.option(
    "--preset",
    type=click.Choice(_PRESETS),
    default="int4-g128",
    show_default=True,
    help="Width of a weight, and how many share a scale.",
)
@click.option(
    "--method",
    type=click.Choice(("rtn", "hqq")),
    default="rtn",
    show_default=True,
    help="Round to nearest, or half-quadratic. GPTQ and AWQ need a model that runs: see the "
    "pass quantize-weights.",
)
@click.option(
    "--range",
    "search",
    type=click.Choice(("min-max", "mse")),
    help="Span all values, or search the range of least squared error.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="PATTERN",
    help="Leave layers of this name as they are; * and ? are wildcards. May be given again.",
)
@click.option("--embeddings", is_flag=True, help="Quantize tables and the output layer too.")
@click.option(
    "--max-shard-size", type=int, metavar="BYTES", help="Size of a file; default: as they are."
)
@click.option("--fresh", is_flag=True, help="Forget what an earlier call finished.")
@force_option
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def quantize(
    checkpoint: Path,
    output: Path,
    preset: str,
    method: str,
    search: str | None,
    skip: tuple[str, ...],
    embeddings: bool,
    max_shard_size: int | None,
    fresh: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Quantize the weights of CHECKPOINT, however large it is.

    CHECKPOINT is a safetensors file, a sharded directory, or a Hugging Face directory. Tensors
    flow through one at a time, from memory-mapped files. The new directory has the
    compressed-tensors layout, which transformers and vLLM load as it is. Killed, the same command
    goes on where it was; under torchrun, the processes share the shards.
    """
    from compressor.cli.results import run_and_show
    from compressor.quantize import QuantizeOptions, quantization_spec
    from compressor.run.runner import RunOptions

    options = QuantizeOptions(preset, method, search, skip, embeddings, max_shard_size)
    code = run_and_show(
        quantization_spec(checkpoint, output, options),
        RunOptions(fresh=fresh, force=force, identify_by_headers=True),
        as_json=as_json,
        quiet=quiet,
    )
    raise click.exceptions.Exit(code)
