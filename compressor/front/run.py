"""Run a spec from Python; the command line does the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from compressor.calibration.sources.iterables import random_numbers_kept
from compressor.front.spec import SpecLike, checked
from compressor.progress import SILENT, Progress
from compressor.report.result import RunResult
from compressor.report.run import run_spec
from compressor.run.options import DEFAULTS, RunOptions
from compressor.spec.user_code import importable
from compressor.types.arguments import check_arguments


@contextmanager
def apart_from_the_program() -> Iterator[None]:
    """Work as in a program of its own, with modules of the current folder.

    Random numbers of the program stay as they are. What it has set for all of PyTorch does not
    act inside: the default type and device of new tensors, autocast, and the modes that record no
    gradients.

    Raises:
        DataError: code of the program that was called has tried to end it.
    """
    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept())
        stack.enter_context(importable([Path.cwd()]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        yield


def run(
    spec: SpecLike,
    options: RunOptions = DEFAULTS,
    *,
    settings: Sequence[str] = (),
    progress: Progress | None = None,
) -> RunResult:
    """Run a spec: compress, export, verify and report, like ``compress run``.

    Nothing is printed. Steps that an earlier run of the same spec finished are reused.

    Example:
        >>> result = compressor.run("spec.yaml", settings=["passes.1.weights.bits=4"])
        >>> result.verdict
        'passed'

    Args:
        spec: the path of a file, its content as a dictionary, or a :class:`compressor.Spec`.
            Relative paths in the last two are relative to the current folder.
        options: options that are not in the spec, such as ``RunOptions(fresh=True)``.
        settings: overrides, as for ``--set``.
        progress: shows the stages of the run.

    Returns:
        The report and the artifacts. A failed limit is a verdict, not an error.

    Raises:
        SpecError: the spec, a setting or the type of an argument is wrong.
        CompressorError: the run cannot continue; finished passes are kept for the next run.
    """
    check_arguments(run, locals())
    with apart_from_the_program():
        return run_spec(checked(spec, settings), options, progress or SILENT)
