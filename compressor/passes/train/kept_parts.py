"""Long parts of a training: each is stored once it is done, so that a killed run resumes.

Such a part is an assistant of ``distill``, or a round of the search of ``archive``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from compressor.files import damage, disk_errors, seal, staging, sync
from compressor.types.training import Training

Result = TypeVar("Result")
_STATE, _DONE = "state", "done"


def kept_part(
    training: Training,
    name: str,
    subject: str,
    do: Callable[[Training], Result],
    write: Callable[[Result, Path], None],
) -> Path:
    """Do a part of a training, or find what an earlier run left of it; return its folder.

    All processes do the part together, and the first one writes it.

    Args:
        name: of the part's folder.
        subject: the part in messages.
        do: it may keep its own state in the folder of the training that it is given.
        write: writes the result into an empty folder.

    Raises:
        InputError: the disk is full.
        CompressorError: as ``do``.
    """
    folder = part_folder(training, name)
    state = folder.with_name(_STATE)
    problem = damage(folder) if folder.is_dir() else ""
    done = folder.is_dir() and not problem
    training.ranks.wait()  # all have looked before the first one writes
    if problem:
        training.note(f"{subject} is damaged ({problem}): it is done again")
    if done:
        return folder
    with disk_errors(state):
        state.mkdir(parents=True, exist_ok=True)
    result = do(replace(training, folder=state))
    if training.ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # it is there if it is damaged
        _store(result, write, folder)
        shutil.rmtree(state)
    training.ranks.wait()
    return folder


def part_folder(training: Training, name: str) -> Path:
    """Return the folder of a part that is done."""
    return training.folder / name / _DONE


def _store(result: Result, write: Callable[[Result, Path], None], target: Path) -> None:
    with staging(target.parent) as staged:
        folder = staged / target.name
        folder.mkdir()
        write(result, folder)
        seal(folder)
        folder.rename(target)
        sync(target.parent)
