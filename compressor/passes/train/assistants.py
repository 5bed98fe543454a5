"""Teacher assistants: models of sizes between teacher and student, taught one after the other.

S. Mirzadeh et al., Improved knowledge distillation via teacher assistant, 2020 (arXiv:1902.03393),
section 3: a teacher that is far larger than its student teaches worse than one in between.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from compressor.errors import SpecError
from compressor.files import disk_errors, json_text, staging, sync
from compressor.passes.train.distill_options import AssistantKeys, model_keys
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome
from compressor.types.training import Training

Teaches: TypeAlias = Callable[[int, Carrier, Carrier, Training], Outcome]
"""Teaches an assistant by its number: assistant and teacher, and what it is trained with."""

_MODEL, _NOTES, _STATE = "model", "notes.json", "state"


def last_assistant(
    assistants: Sequence[AssistantKeys], teacher: Carrier, training: Training, teaches: Teaches
) -> tuple[Carrier, tuple[str, ...]]:
    """Teach each assistant by the one before; those that have been taught already are kept.

    Args:
        assistants: from large to small.
        teacher: of the first.
        training: of the student; each assistant has a folder of its own in its folder.
        teaches: trains one.

    Returns:
        The last one, and what is to be told about all of them.

    Raises:
        CompressorError: one cannot be opened or trained.
    """
    notes: list[str] = []
    for index, keys in enumerate(assistants):
        option = f"assistants.{index}"
        assistant = training.open_model(model_keys(keys), option)
        if keys.epochs:
            if Capability.TRAIN not in assistant.offers:
                raise SpecError(option, "cannot be trained", "give a factory, or set epochs: 0")
            assistant, own = _taught(index, assistant, teacher, training, teaches)
            notes += [f"{option}: {note}" for note in own]
        teacher = assistant
    return teacher, tuple(notes)


def _taught(
    index: int, assistant: Carrier, teacher: Carrier, training: Training, teaches: Teaches
) -> tuple[Carrier, list[str]]:
    folder = training.folder / f"assistant-{index}"
    done, state = folder / "taught", folder / _STATE
    known = done.is_dir()
    training.ranks.wait()  # all have looked before the first one writes
    if not known:
        with disk_errors(state):
            state.mkdir(parents=True, exist_ok=True)
        outcome = teaches(index, assistant, teacher, replace(training, folder=state))
        if training.ranks.rank == 0:
            _store(outcome, done)
            shutil.rmtree(state)
        training.ranks.wait()
    notes: list[str] = json.loads((done / _NOTES).read_text(encoding="utf-8"))
    return assistant.restore(done / _MODEL), notes


def _store(outcome: Outcome, target: Path) -> None:
    """Write a taught assistant, whole or not at all."""
    with staging(target.parent) as staged:
        own = staged / target.name
        (own / _MODEL).mkdir(parents=True)
        outcome.carrier.save(own / _MODEL)
        (own / _NOTES).write_text(json_text(list(outcome.notes)), encoding="utf-8")
        for file in own.rglob("*"):
            sync(file)
        own.rename(target)
        sync(target.parent)
