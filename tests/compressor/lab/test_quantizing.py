"""What ``compress quantize`` advises where it would quantize no layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from compressor.cli.application import application
from compressor.errors import ExitCode


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        (nn.Linear(20, 8), ["--preset", "int4-g32"], "; use --preset int8\n"),
        (nn.Linear(20, 8), ["--format", "awq"], "; use another --format\n"),
        (nn.Linear(64, 8), ["--format", "awq"], "; use --preset int4-g32\n"),
        (nn.Linear(64, 8), ["--skip", "*"], "; use --skip for fewer layers\n"),
        (nn.Conv2d(3, 8, 3), [], "; write a spec with model.factory (compress init does) and "),
        (weight_norm(nn.Linear(64, 8)), [], "; save plain ones, after torch.nn.utils.parametrize."),
    ],
)
def test_a_remedy_is_none_that_was_taken_already(
    tmp_path: Path, kind: nn.Module, options: list[str], remedy: str
):
    """It advised --preset int4-g32 to whoever had just used that, and presets for convolutions."""
    weights = tmp_path / "weights.safetensors"
    save_file(nn.Sequential(kind).state_dict(), weights)
    refused = CliRunner().invoke(
        application, ["quantize", str(weights), "-o", str(tmp_path / "out"), *options]
    )
    assert refused.exit_code in (ExitCode.BAD_SPEC, ExitCode.BAD_INPUT)
    assert remedy in refused.stderr
