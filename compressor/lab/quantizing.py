"""The spec behind ``compress quantize``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compressor.errors import CompressorError, SpecError
from compressor.models.transformers.lengths import piece_length
from compressor.models.transformers.networks import CONFIG, read_config
from compressor.spec.load import Spec, check_spec
from compressor.spec.source_text import Document
from compressor.types.layer_rules import NO_LAYER, SKIPPED, TO_SINGLE

CALIBRATED = (
    *("gptq", "awq", "reconstruct"),
    *("int8-w8a8-static", "fp8-w8a8-static", "nvfp4-w4a4"),
)
"""Methods and presets of ``compress quantize`` that look at text."""

QuantizedFormat = Literal["compressed-tensors", "gptq", "awq", "gguf", "genai"]
_DIRECTORIES = ("compressed-tensors", "gptq", "awq")
_READS_DIRECTORIES = ("transformers", "vllm", "vllm-cpu")
_READ: Mapping[str, QuantizedFormat] = {"llama.cpp": "gguf", "genai": "genai"}

_TABLES = re.compile("table is looked up|is the output layer")
_IN_A_SPEC = (
    "write a spec with model.factory (compress init does) and the export format onnx, which takes "
    "layers of all kinds"
)
_NARROW = 32  # the narrowest group that all formats take
_REMEDIES = {
    "put {pass: cast, dtype: fp32} before it, or save": "save",
    "leave out this export": "use another --format",
    "leave out embeddings": "leave out --embeddings",
    "by a rule": "by --skip",
}


@dataclass(frozen=True)
class QuantizeOptions:
    """What ``compress quantize`` may be told.

    Attributes:
        preset: a preset of the pass ``quantize-weights``; ``None`` takes what suits the format and
            the widths of layers.
        method: one that needs weights alone, or sees one block at a time.
        skip: patterns of layers that are left as they are.
        embeddings: quantize tables and the output layer too.
        max_shard_size: bytes of a written file at most; ``None`` keeps the input's shards.
        text: what methods ``gptq``, ``awq`` and ``reconstruct`` calibrate on.
        samples: how many pieces of it, of ``length`` tokens each; ``None`` takes what
            :func:`~compressor.models.transformers.lengths.piece_length` says.
        evaluation: text on which the result is judged.
        format: of the result; ``None`` takes that of the consumer.
        consumer: what is going to read it; the plan refuses what that has no kernels for.
        smooth: scale channels first, so that rounded activations lose less.
        cache: what the keys and values are rounded to that attention keeps.
    """

    preset: str | None = None
    method: str = "rtn"
    range: str | None = None
    skip: Sequence[str] = ()
    embeddings: bool = False
    max_shard_size: int | None = None
    text: Path | None = None
    samples: int = 128
    length: int | None = None
    evaluation: Path | None = None
    format: QuantizedFormat | None = None
    consumer: str | None = None
    smooth: bool = False
    cache: Literal["fp8", "int8", "int4"] | None = None


def quantization_spec(checkpoint: Path, output: Path, options: QuantizeOptions) -> Spec:
    """Return the spec that quantizes a checkpoint's weights, for others to load.

    Args:
        checkpoint: a safetensors file or a directory of them.

    Raises:
        SpecError: an option is wrong, or the output is the checkpoint itself.
    """
    source, target = checkpoint.resolve(), output.resolve()
    if target == (source if source.is_dir() else source.parent):
        raise SpecError(
            f"output {str(output)!r}", "is the folder of the checkpoint", "name another folder"
        )
    format = _format(options)
    step: dict[str, Any] = {
        "pass": "quantize-weights",
        "preset": options.preset or _usual_preset(source, format),
        "method": options.method,
        "embeddings": options.embeddings,
        "layers": [{"match": pattern, "skip": True} for pattern in options.skip],
    }
    export: dict[str, Any] = {"format": format}
    if format in _DIRECTORIES:
        export = {"format": "safetensors", "layout": format}
        if options.consumer is not None:
            export["consumer"] = options.consumer
    elif options.max_shard_size is not None:
        raise SpecError(
            "option --max-shard-size",
            f"is given with --format {format}, which writes one file of weights",
            "leave it out",
        )
    if options.range is not None:
        step["range"] = options.range
    if options.max_shard_size is not None:
        export["max-shard-size"] = options.max_shard_size
    passes = [step]
    if options.smooth:
        passes.insert(0, {"pass": "smooth"})
    if options.cache is not None:
        kept = "fp8-e4m3" if options.cache == "fp8" else options.cache
        passes.append({"pass": "quantize-cache", "format": kept})
    added = [
        name
        for name, wanted in (("--smooth", options.smooth), ("--kv-cache", options.cache))
        if wanted
    ]
    reads = bool(added) or options.method in CALIBRATED or step["preset"] in CALIBRATED
    if reads != (options.text is not None):
        both = added[0] if added else f"method {options.method!r} with preset {step['preset']!r}"
        raise SpecError(
            "option --text",
            f"is {'given' if options.text else 'missing'}, and {both} "
            f"{'is calibrated on text' if reads else 'reads no text'}",
            "leave it out, or use --method gptq, awq or reconstruct, --smooth or --kv-cache"
            if options.text
            else "give --text train.txt",
        )
    folder = source if source.is_dir() else source.parent
    value: dict[str, Any] = {
        "version": 1,
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", target.name).strip("-._") or "quantized",
        # A dollar in a path of the command line is a dollar.
        "model": {"checkpoint": str(checkpoint).replace("$", "$$")},
        "passes": passes,
        "exports": [export],
        "output": str(output).replace("$", "$$"),
    }
    data = {}
    if options.text is not None:
        calibration = _text(options.text, folder, options)
        data["calibration"] = {**calibration, "samples": options.samples}
    if options.evaluation is not None:
        data["evaluation"] = {**_text(options.evaluation, folder, options), "target": "labels"}
        value["metric"] = "perplexity"
    if data:
        value["data"] = data
    return check_spec(Document(Path("compress quantize"), value))


@contextmanager
def in_terms_of_options(options: QuantizeOptions) -> Iterator[None]:
    """Give errors of the spec that the command makes the remedies that its user has."""
    try:
        yield
    except CompressorError as error:
        if error.problem.startswith(NO_LAYER) and error.remedy != TO_SINGLE:
            error.remedy = _way_out(error.problem, options)
        for in_a_spec, as_an_option in _REMEDIES.items():
            error.remedy = error.remedy.replace(in_a_spec, as_an_option)
        raise


def _usual_preset(checkpoint: Path, format: QuantizedFormat) -> str:
    """Return the preset that a format and the widths of a checkpoint's layers suggest.

    32 weights share a scale in GGUF's blocks in any case, and in the files that genai makes itself.
    """
    from compressor.lab.inspect.checkpoint import weight_summary

    group = weight_summary(checkpoint).group if format in _DIRECTORIES else _NARROW
    return f"int4-g{group}"


def _way_out(problem: str, options: QuantizeOptions) -> str:
    """Return what makes the command quantize some layer, by why it would none."""
    ways = []
    if undivided := re.findall(r"(\d+) input columns do not divide into groups of (\d+)", problem):
        divided = any(int(n) % _NARROW == 0 for n, g in undivided if int(g) > _NARROW)
        presets = [f"int4-g{_NARROW}"] if divided else []
        presets += [] if options.format in ("awq", "gguf") else ["int8"]
        ways.append(f"--preset {' or '.join(presets)}" if presets else "another --format")
    if "GGUF's blocks" in problem:
        ways.append("another --format")
    ways += ["--skip for fewer layers"] if SKIPPED in problem else []
    ways += ["--embeddings"] if not options.embeddings and _TABLES.search(problem) else []
    return f"use {', or '.join(dict.fromkeys(ways))}" if ways else _IN_A_SPEC


def _format(options: QuantizeOptions) -> QuantizedFormat:
    """Return the format of the result.

    Raises:
        SpecError: what is going to read it reads another one.
    """
    if options.consumer is None:
        return options.format or "compressed-tensors"
    read = _READ.get(options.consumer, "compressed-tensors")
    if options.consumer in _READS_DIRECTORIES and options.format in _DIRECTORIES:
        return options.format
    if options.format not in (None, read):
        raise SpecError(
            "option --for",
            f"is {options.consumer!r}, which does not read {options.format}",
            f"use --format {read}",
        )
    return read


def _text(path: Path, folder: Path, options: QuantizeOptions) -> dict[str, Any]:
    described = folder / CONFIG
    config = read_config(folder) if described.is_file() else {}
    return {
        "text": str(path).replace("$", "$$"),
        "tokenizer": str(folder).replace("$", "$$"),
        "length": options.length or piece_length(config),
        "batch": 1,  # memory holds the attention of so many
        "inputs": {"input_ids": "input_ids"},
    }
