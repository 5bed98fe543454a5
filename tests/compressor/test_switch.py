"""Files of a folder change together, whenever the process is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import ModelError
from compressor.files import settle, switch

OLD = {"model.onnx": "old", "sub/weights": "old", "gone.npz": "old", "kept": "kept"}
NEW = {"model.onnx": "new", "sub/weights": "new", "report.json": "new", "kept": "kept"}
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    names = ((p.relative_to(folder).as_posix(), p) for p in files)
    return {name: p.read_text() for name, p in names if not name.startswith(".")}


def replace_all(folder: Path) -> None:
    with switch(folder) as (staged, gone):
        write(staged, {name: text for name, text in NEW.items() if text == "new"})
        gone.append("gone.npz")


def killed_at(event: int, function: Callable[[], None]) -> bool:
    """Call a function in a process that ends just before its n-th file event, if it comes to it."""
    child = os.fork()
    if child == 0:
        left = [event]

        def count(name: str, _: Any) -> None:
            left[0] -= name in EVENTS
            if left[0] < 0:
                os._exit(9)

        sys.addaudithook(count)
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_killed_at_any_event_it_has_happened_or_has_not(tmp_path: Path) -> None:
    outcomes = []
    for event in range(500):
        folder = tmp_path / str(event)
        write(folder, OLD)
        killed = killed_at(event, lambda folder=folder: replace_all(folder))  # type: ignore[misc]
        staged = not (folder / ".switch").exists()
        assert not staged or content(folder) in (OLD, NEW)  # without a command that comes after
        settle(folder)
        assert content(folder) in (OLD, NEW)
        assert not (folder / ".switch").exists()
        outcomes.append(content(folder) == NEW)
        if not killed:
            break
    assert outcomes == sorted(outcomes)  # not a return to the old files, once they are replaced
    assert outcomes.count(False) > 10
    assert outcomes.count(True) > 10


def test_killed_while_it_is_finished_the_next_finishes_it(tmp_path: Path) -> None:
    for event in range(500):
        folder = tmp_path / str(event)
        write(folder, OLD)
        pending(folder)
        killed = killed_at(event, lambda folder=folder: settle(folder))  # type: ignore[misc]
        settle(folder)
        assert content(folder) == NEW
        if not killed:
            break
    assert event > 10


def pending(folder: Path) -> Path:
    """Leave a folder as a process does that is killed just after the switch."""
    switch_folder = folder / ".switch"
    write(switch_folder / "new", {name: text for name, text in NEW.items() if text == "new"})
    (switch_folder / "gone.json").write_text(json.dumps(["gone.npz"]))
    return switch_folder


def linked_file(folder: Path, outside: Path) -> None:
    (folder / ".switch" / "new" / "link").symlink_to(outside / "secret")


def linked_place(folder: Path, outside: Path) -> None:
    (folder / "place").symlink_to(outside)
    write(folder / ".switch" / "new", {"place/secret": "overwritten"})


def linked_new(folder: Path, outside: Path) -> None:
    (folder / ".switch" / "new").rename(folder / "elsewhere")
    (folder / ".switch" / "new").symlink_to(outside)


def gone(value: Any) -> Callable[[Path, Path], None]:
    def change(folder: Path, _: Path) -> None:
        (folder / ".switch" / "gone.json").write_text(json.dumps(value))

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(linked_file, id="a link among the new files"),
        pytest.param(linked_place, id="a new file behind a link"),
        pytest.param(linked_new, id="the new files are a link"),
        pytest.param(gone(["../outside/secret"]), id="a file above is to go"),
        pytest.param(gone([".."]), id="the folder above is to go"),
        pytest.param(gone(["a\0b"]), id="no name"),
        pytest.param(gone([1]), id="a number"),
        pytest.param(gone({}), id="no list"),
    ],
)
def test_a_switch_that_leads_elsewhere_is_refused(
    tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    write(folder, OLD)
    write(outside, {"secret": "secret"})
    pending(folder)
    change(folder, outside)
    with pytest.raises(ModelError, match=r"unfinished switch .* no run of compressor made"):
        settle(folder)
    assert content(outside) == {"secret": "secret"}
    assert OLD.items() <= content(folder).items()


def test_an_error_on_the_way_leaves_the_old_files(tmp_path: Path) -> None:
    write(tmp_path, OLD)
    with pytest.raises(OSError, match="broken"):
        fail_on_the_way(tmp_path)
    assert content(tmp_path) == OLD
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def fail_on_the_way(folder: Path) -> None:
    with switch(folder) as (staged, _):
        write(staged, NEW)
        raise OSError("broken")
