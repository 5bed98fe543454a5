"""Candidates that other processes make."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.lab.tune import structure, workers
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.opened import opened_bench
from compressor.lab.tune.recipe import REMEDIES, Recipe, base_recipe
from compressor.lab.tune.watch import Watch
from compressor.lab.tune.workers import DaskCrew, Task, dask_crew
from compressor.progress import Silent
from compressor.run.store import Store, store_of
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import Project, sample_images

LOOSE = ("--max-metric-drop", "30", "--rounds", "1")


def tuned(project: Project, *arguments: str) -> Result:
    return CliRunner().invoke(application, ["tune", str(project.path), *arguments])


@pytest.fixture
def project(on_onnx: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setitem(REMEDIES, "quantize-static", REMEDIES["quantize-static"][:1])
    monkeypatch.setattr(structure, "_SHARES", ())
    on_onnx.spec["passes"] = [{"pass": "quantize-static", "activations": {"observer": "min-max"}}]
    np.savez(on_onnx.folder / "calib.npz", image=sample_images(2, 256))
    on_onnx.spec["data"]["calibration"]["samples"] = 64
    return on_onnx


def test_what_a_worker_has_made_is_found_in_the_store(project: Project):
    spec, goal = load_spec(project.path), Goal(metric_drop=30.0)
    bench, _ = opened_bench(spec, goal, Silent())
    recipe = base_recipe(bench.spec).with_choice({"*": "8"})
    task = pickle.loads(pickle.dumps(Task.of(spec, goal)))
    assert task.make(recipe) == ""
    made = bench.candidate("8 bits", recipe, {})
    bench.searched(made)
    assert bench.store.written == 0
    assert "is not a known" in task.make(recipe.after({"pass": "fuse", "x": 1}))


def test_two_that_finish_the_same_leave_one_entry(tmp_path: Path):
    one, other = Store(tmp_path / "s"), Store(tmp_path / "s")
    with one.write("ab12") as (folder, result):
        (folder / "file").write_text("x")
        result["n"] = 1
        with other.write("ab12") as (theirs, same):
            (theirs / "file").write_text("x")
            same["n"] = 1
    assert one.read("ab12") == other.read("ab12") == {"n": 1}
    assert not list((tmp_path / "s").glob(".staging*"))
    (one.folder("ab12") / "file").write_text("damaged")
    fresh = Store(tmp_path / "s")
    assert fresh.read("ab12") is None
    with fresh.write("ab12") as (folder, result):
        (folder / "file").write_text("y")
        result["n"] = 2
    assert Store(tmp_path / "s").read("ab12") == {"n": 2}


class Broken:
    """A client whose worker dies."""

    class Lost:
        status = "error"

        def exception(self) -> Exception:
            return RuntimeError("killed")

    def submit(self, *_: object, **__: object) -> Lost:
        return self.Lost()


def test_a_candidate_that_is_lost_with_its_worker_is_made_here(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    distributed = pytest.importorskip("distributed", reason="needs the extra compressor[dask]")
    monkeypatch.setattr(distributed, "wait", lambda futures, timeout: (futures, timeout))
    notes: list[str] = []

    class Noted(Silent):
        def note(self, message: str) -> None:
            notes.append(message)

    spec, goal = load_spec(project.path), Goal(metric_drop=30.0)
    crew = DaskCrew(Broken(), Task.of(spec, goal), Noted(), Watch())
    crew.ahead([base_recipe(spec)])
    assert notes == ["a worker was lost (RuntimeError): done again here"]


def test_workers_end_when_the_time_is_up(project: Project, monkeypatch: pytest.MonkeyPatch):
    distributed = pytest.importorskip("distributed", reason="needs the extra compressor[dask]")
    spec, goal, left, ended = (
        load_spec(project.path),
        Goal(metric_drop=30.0),
        list[float](),
        list[Any](),
    )

    class Slow:
        def submit(self, _: object, __: Recipe, seconds: float, **___: object) -> Any:
            left.append(seconds)
            return SimpleNamespace(status="cancelled")

        def cancel(self, futures: Sequence[Any]) -> None:
            ended.extend(futures)

    def late(_: object, timeout: float) -> None:
        raise TimeoutError(timeout)

    monkeypatch.setattr(distributed, "wait", late)
    watch = Watch()
    crew = DaskCrew(Slow(), Task.of(spec, goal), Silent(), watch)
    watch.start(60.0)
    crew.ahead([base_recipe(spec)] * 2)
    assert len(ended) == 2
    assert all(50.0 < seconds <= 60.0 for seconds in left)
    watch.start(0.0)
    crew.ahead([base_recipe(spec)])
    assert len(left) == 2  # nothing is begun


def test_a_scheduler_that_does_not_answer_is_an_error(project: Project):
    pytest.importorskip("distributed", reason="needs the extra compressor[dask]")
    result = tuned(project, *LOOSE, "--scheduler", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere' does not answer" in result.stderr


def test_one_worker_is_this_process(project: Project):
    with dask_crew(load_spec(project.path), Goal(), 1, None, Silent(), Watch()) as crew:
        assert isinstance(crew, workers.Nobody)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_one_and_three_workers_give_the_same_spec_though_one_is_killed(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    distributed = pytest.importorskip("distributed", reason="needs the extra compressor[dask]")
    ahead = DaskCrew.ahead
    killed: list[int] = []

    def deadly(self: DaskCrew, recipes: Sequence[Recipe]) -> None:
        def kill() -> None:
            time.sleep(0.5)
            killed.append(next(iter(self.client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

        if not killed:
            thread = threading.Thread(target=kill)
            thread.start()
            ahead(self, recipes)
            thread.join()
        else:
            ahead(self, recipes)

    assert tuned(project, *LOOSE).exit_code == 0
    alone = (project.folder / "tuned.yaml").read_text()
    points = json.loads((project.folder / "tuned.json").read_text())["points"]
    bench, _ = opened_bench(load_spec(project.path), Goal(metric_drop=30.0), Silent())
    bench.store.forget()
    assert store_of(bench.spec.output).is_dir()
    monkeypatch.setattr(DaskCrew, "ahead", deadly)
    result = tuned(project, *LOOSE, "--workers", "3")
    assert result.exit_code == 0, result.stderr
    assert killed
    assert distributed is not None
    assert (project.folder / "tuned.yaml").read_text() == alone
    found = json.loads((project.folder / "tuned.json").read_text())["points"]
    for point in (*points, *found):  # what was timed differs each time
        point["latency_ratio"] = point["latency_ci95"] = None
    assert found == points
