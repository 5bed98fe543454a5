"""Several processes that make candidates: on this machine, or on a cluster that runs Dask.

Whoever makes a candidate leaves it in the store, under a key that holds all that determines it. So
workers only go ahead: the search asks for each candidate in its own order, and finds in the store
what a worker has finished. That is why any number of workers gives the same answer, and why a
worker that is killed costs its candidate only, which the search then makes itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from compressor.errors import CompressorError, SpecError
from compressor.files import json_text
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.opened import opened_bench
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.watch import Watch
from compressor.lab.tune.workbench import Workbench
from compressor.progress import Progress, Silent
from compressor.spec.load import Spec, check_spec
from compressor.spec.source_text import Document
from compressor.spec.user_code import importable

_HOW = "pip install 'compressor[dask]'"


@dataclass(frozen=True)
class Task:
    """What a worker needs to make candidates of one search; it goes through a pickle.

    Attributes:
        spec: the file that the search began with.
        value: its content.
        goal: what is asked for.
        folders: where modules are imported from.
        threads: of each operator, as in the process that searches: sums depend on it.
    """

    spec: Path
    value: Mapping[str, Any]
    goal: Goal
    folders: tuple[Path, ...]
    threads: int

    @classmethod
    def of(cls, spec: Spec, goal: Goal) -> Task:
        """Return what a search hands to its workers."""
        place = spec.document.path.resolve()
        value = dict(spec.document.value)
        return cls(place, value, goal, (Path.cwd(), spec.folder), torch.get_num_threads())

    def make(self, recipe: Recipe, left: float | None = None) -> str:
        """Make a candidate and look at the search data; all of it is then in the store.

        Args:
            left: seconds after which it ends; ``None`` for no end.

        Returns:
            why it failed; empty if it did not.
        """
        torch.set_num_threads(self.threads)
        with importable(self.folders):
            bench = _bench(json_text({"place": str(self.spec), "value": self.value}), self.goal)
            bench.watch.start(left)
            try:
                bench.searched(bench.candidate("ahead", recipe, {}))
            except CompressorError as error:
                return str(error)
            finally:
                bench.made.clear()
        return ""


@lru_cache(maxsize=1)
def _bench(text: str, goal: Goal) -> Workbench:
    """Return the workbench of a search, opened once by each worker."""
    given = json.loads(text)
    spec = check_spec(Document(Path(given["place"]), given["value"]))
    bench, _ = opened_bench(spec, goal, Silent())
    bench.helps = True
    return bench


class Crew(Protocol):
    """Whoever makes candidates ahead."""

    def ahead(self, recipes: Sequence[Recipe]) -> None:
        """Make candidates; come back when all are made, so that timings run alone."""
        ...


class Nobody:
    """A search in one process."""

    def ahead(self, recipes: Sequence[Recipe]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class DaskCrew:
    """Workers that a Dask client talks to."""

    client: Any
    task: Task
    progress: Progress
    watch: Watch

    def ahead(self, recipes: Sequence[Recipe]) -> None:
        """Make candidates; one that is lost with its worker is left for the search to make."""
        from distributed import wait

        left = self.watch.left
        if left == 0.0:
            return
        with self.progress.stage(f"{len(recipes)} candidates at once", len(recipes)):
            futures = [self.client.submit(self.task.make, r, left, pure=False) for r in recipes]
            try:
                wait(futures, timeout=left)
            except TimeoutError:  # what has not begun; the others look at the time themselves
                self.client.cancel(futures)
        for future in futures:
            if future.status not in ("finished", "cancelled"):
                lost = future.exception()
                self.progress.note(f"a worker was lost ({type(lost).__name__}): done again here")


@contextmanager
def dask_crew(
    spec: Spec,
    goal: Goal,
    workers: int | None,
    scheduler: str | None,
    progress: Progress,
    watch: Watch,
) -> Iterator[Crew]:
    """Yield workers: processes of this machine, or those of a cluster.

    Args:
        watch: whose time ends their candidates, too.
        workers: how many processes to start; ``None`` or 1 for none.
        scheduler: the address of a cluster whose machines share this folder; empty for none.

    Raises:
        SpecError: ``distributed`` is missing, or nobody answers at the address.
    """
    if scheduler is None and (workers or 1) == 1:
        yield Nobody()
        return
    option = "--workers" if scheduler is None else "--scheduler"
    if spec.objects:
        raise SpecError(f"option {option}", "needs functions by their names", "leave it out")
    try:
        import dask
        from distributed import Client, LocalCluster
    except ModuleNotFoundError as error:
        raise SpecError(f"option {option}", "needs the package distributed", _HOW) from error
    # A candidate whose worker dies is not tried on the next one: it may kill that, too. And
    # workers compute with the same threads as this process.
    settings = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.nanny.pre-spawn-environ": {},
    }
    task = Task.of(spec, goal)
    with dask.config.set(settings):
        if scheduler is not None:
            with _client(Client, scheduler) as client:
                yield DaskCrew(client, task, progress, watch)
            return
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit=None
        )
        with cluster, Client(cluster) as client:
            yield DaskCrew(client, task, progress, watch)


def _client(make: Callable[..., Any], address: str) -> Any:
    try:
        return make(address, timeout=10)
    except (OSError, ValueError) as error:
        raise SpecError(
            "option --scheduler", f"{address!r} does not answer", "start dask scheduler there"
        ) from error
