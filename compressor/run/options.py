"""Options of a run that its spec does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.types.arguments import check_arguments
from compressor.types.data import ALONE, Ranks
from compressor.types.training import OwnLoop, TrainingStep


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not in the spec.

    Attributes:
        fresh: discard the stored results of earlier runs.
        force: write into a folder that holds other files; those of the same names are replaced,
            others stay.
        identify_by_headers: identify a checkpoint by the sizes, times and headers of its files,
            instead of reading all of it to hash it.
        ranks: the processes that share the run; the first alone measures and writes.
        history: a file that the run is added to; the report plots its trend.
        label: the name of the run in the history.
        memory: also measure the peak memory of each model, in a process of its own.
        strict: an unknown verdict fails the run.
        proves: check an artifact that cannot be run here with the program that will serve it.
        loop: a training loop of the program's own, in place of that of the pass that trains.
        callbacks: functions that are called after each training step with a
            :class:`compressor.TrainingStep`; an exception in one ends the run.
    """

    fresh: bool = False
    force: bool = False
    identify_by_headers: bool = False
    ranks: Ranks = ALONE
    history: Path | None = None
    label: str = ""
    memory: bool = False
    strict: bool = False
    proves: bool = True
    loop: OwnLoop | None = None
    callbacks: Sequence[Callable[[TrainingStep], None]] = ()

    def __post_init__(self) -> None:
        """Refuse values of other types, before a run has begun."""
        check_arguments(RunOptions, vars(self))


DEFAULTS = RunOptions()
