"""Results by content: a result of the same inputs is computed only once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from compressor.errors import CompressorError, SpecError
from compressor.files import (
    damage,
    disk_errors,
    json_sha256,
    remove_stale_staging,
    seal,
    staging,
    sync,
)

_VERSION = 4  # of what is stored; raised when older results cannot be read any more
_COMPUTE = ("compressor", "accelerate", "torch", "numpy", "onnx", "onnx-ir", "onnxscript")
_RESULT = "result.json"
_LOCK = ".lock"
_PARTIAL = "partial-"
_TRAINING = "training-"
_CACHE = "cache"

STORE = ".compressor"
"""The folder beside a run's output that holds the stores of all runs there."""


def store_of(output: Path) -> Path:
    """Return the folder of a run's store: beside the output, which holds what is published."""
    place = output.resolve()
    return place.parent / STORE / place.name


@cache
def compute_versions() -> Mapping[str, str]:
    """Versions of everything that results depend on."""
    return {name: version(name) for name in _COMPUTE} | {"runtime": runtime_version()}


@cache
def runtime_version() -> str:
    """Version of ONNX Runtime, under whichever of its distributions it is installed."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def result_key(kind: str, upstream: str, **parts: Any) -> str:
    """Return the key of a result.

    Args:
        upstream: the key of the result that it is computed from.
        parts: everything else that determines it, as JSON values.
    """
    return json_sha256(
        {
            "kind": kind,
            "store": _VERSION,
            "upstream": upstream,
            "versions": dict(compute_versions()),
            **parts,
        }
    )


def _put(folder: Path, target: Path, *, old: bool) -> None:
    """Make a folder an entry; what another process has put there meanwhile is as good.

    Args:
        old: there was an entry before this one was begun, which it replaces.
    """
    try:
        if old and target.exists():
            shutil.rmtree(target)
        folder.replace(target)
    except OSError:
        if damage(target):
            raise
        shutil.rmtree(folder, ignore_errors=True)


class Store:
    """A folder of finished results; each entry appears whole or not at all.

    An entry carries the hashes of its files. They are checked when it is first read: one that is
    damaged counts as missing.

    Args:
        root: the folder; made on first use.
        note: called with one line about each damaged entry.
    """

    def __init__(self, root: Path, note: Callable[[str], None] = lambda _: None):
        self._root = root
        self._note = note
        self._intact: set[str] = set()
        self._damaged: set[str] = set()
        self.written = 0
        """How many entries were written through this object."""

    def read(self, key: str) -> Any | None:
        """Return the result stored under ``key``; ``None`` if there is none or it is damaged."""
        folder = self.folder(key)
        if key not in self._intact:
            if not folder.is_dir():
                return None
            problem = damage(folder)
            if problem:
                if key not in self._damaged:
                    place = folder.relative_to(self._root.parent.parent).as_posix()
                    self._note(f"stored result {place} is damaged ({problem}): it is done again")
                self._damaged.add(key)
                return None
            self._intact.add(key)
        return json.loads((folder / _RESULT).read_text(encoding="utf-8"))

    def folder(self, key: str) -> Path:
        """The folder of an entry."""
        return self._root / key[:2] / key[2:]

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Store a result without files."""
        with self.write(key) as (_, stored):
            stored.update(result)

    @contextmanager
    def write(
        self, key: str, *, resumable: bool = False, hashes: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield a folder to fill and a result to set; both are kept if the block succeeds.

        Args:
            hashes: SHA-256 of files that the block has hashed itself, by their paths in the folder.
            resumable: keep the folder if the process is killed or the disk is full; the next call
                with this key yields it again with its content.
        """
        result: dict[str, Any] = {}
        with self._lasting(key) if resumable else staging(self._root) as folder:
            target = self.folder(key)
            old = target.exists()
            yield folder, result
            (folder / _RESULT).write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
            seal(folder, hashes)
            target.parent.mkdir(parents=True, exist_ok=True)
            _put(folder, target, old=old)
            sync(target.parent)
            self._intact.add(key)
            self.written += 1

    def partial(self, key: str) -> Path:
        """The folder that a resumable result grows in."""
        return self._root / f"{_PARTIAL}{key}"

    @property
    def cache(self) -> Path:
        """A folder for data that several results share; its files are named by content."""
        return self._root / _CACHE

    def training(self, key: str) -> Path:
        """The folder for the state of the training that gives a result."""
        return self._root / f"{_TRAINING}{key}"

    def trainings(self) -> list[Path]:
        """Return the folders of all unfinished trainings."""
        return sorted(self._root.glob(f"{_TRAINING}*"))

    @contextmanager
    def _lasting(self, key: str) -> Iterator[Path]:
        """Yield a folder for a key; it is removed only if its content is of no use."""
        folder = self.partial(key)
        try:
            with disk_errors(self._root):
                folder.mkdir(parents=True, exist_ok=True)
                yield folder
        except CompressorError as error:
            if not isinstance(error.__cause__, OSError):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def forget(self) -> None:
        """Remove every result; call it while the store is locked.

        Raises:
            SpecError: the store is a link: what it leads to may be somebody else's.
        """
        if self._root.is_symlink():
            raise SpecError(
                f"folder {str(self._root)!r}",
                "is a link, and --fresh would delete what it leads to",
                "remove the link, or run without --fresh",
            )
        self._intact.clear()
        for entry in self._root.iterdir():
            if entry.is_dir():  # the lock itself stays: another process may be looking at it
                shutil.rmtree(entry, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store against other processes.

        Raises:
            SpecError: another process uses it.
        """
        with disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._root / _LOCK)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise SpecError(
                    f"output {str(self._root.parent.parent / self._root.name)!r}",
                    "is in use by another run",
                    "wait for it, or give this run another output",
                ) from error
        try:
            remove_stale_staging(self._root)
            remove_stale_staging(self.cache)
            yield
        finally:
            lock.release()
            self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Remove the store of a run that failed before anything was finished."""
        with suppress(OSError):  # there is none, or it holds something
            self.cache.rmdir()
        if any(path.name != _LOCK for path in self._root.iterdir()):
            return
        shutil.rmtree(self._root, ignore_errors=True)
        with suppress(OSError):  # it holds other stores
            self._root.parent.rmdir()
