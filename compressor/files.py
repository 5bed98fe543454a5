"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from compressor.errors import FullDiskError, ModelError, SpecError, system_error

STAGING = ".staging-"  # what names of folders begin with that go once they have been filled
_NAME_SHOWN = 80  # characters in a message
_LONGEST_NAME = 255  # bytes
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_JSON_BYTES = 100_000_000  # that any JSON may take in memory
_CUT = "the file is truncated or damaged"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn failures of the file system into messages with a remedy.

    Raises:
        InputError: the disk is full or broken.
        SpecError: the place cannot be written to.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        subject, number = f"folder {str(path)!r}", system_error(error)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            problem = f"is full ({os.strerror(number)})"
            remedy = "free some space and run the same command again"
            raise FullDiskError(subject, problem, remedy) from error
        place = Path(str(getattr(error, "filename", ""))).name.startswith(STAGING)  # takes none
        if number in _REFUSED or (number == errno.ENOENT and place):
            problem = f"cannot be written ({os.strerror(number)})"
            raise SpecError(subject, problem, "choose another output") from error
        raise


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Yield an empty folder inside ``parent`` that is gone afterwards, whatever happens."""
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


_SCRATCH = "compressor-"
_YOUNG = 60.0  # seconds in which a folder may not be locked yet


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder among the temporary files of the system; it is gone afterwards.

    Folders of processes that were killed are removed on the way: a live process holds a lock on
    each of its own.

    Raises:
        InputError: there is no room in it.
    """
    parent = Path(tempfile.gettempdir())
    with disk_errors(parent):
        _remove_left_scratch(parent)
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _remove_left_scratch(parent: Path) -> None:
    for folder in parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # it is gone meanwhile, or somebody holds its lock
            state = folder.lstat()
            ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
            if not ours or time.time() - state.st_mtime < _YOUNG:
                continue
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def remove_stale_staging(parent: Path) -> None:
    """Remove staging folders that a killed process left."""
    for folder in parent.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SEAL = "seal.json"  # the file in a folder that holds the hashes of the others


def seal(folder: Path, hashes: Mapping[str, str] | None = None) -> None:
    """Write the SHA-256 of all of a folder's files beside them, and force everything to the disk.

    Args:
        hashes: those that are already computed, by the files' paths in the folder.
    """
    ready = hashes or {}
    sums = {}
    for name, path in _files_in(folder):
        sums[name] = ready.get(name) or file_sha256(path)
    (folder / SEAL).write_text(json.dumps(sums, sort_keys=True), encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        sync(path)


def damage(folder: Path) -> str:
    """Return what has happened to a folder since it was sealed; empty if its bytes are the same."""
    try:
        sums = json.loads((folder / SEAL).read_bytes())
        files = dict(_files_in(folder))
        if not isinstance(sums, dict):
            return f"{SEAL!r} is not as it was written"
        odd = sorted(sums.keys() ^ files.keys())
        if odd:
            return f"{odd[0][:_NAME_SHOWN]!r} is {'not in it' if odd[0] in sums else 'new'}"
        for name, path in sorted(files.items()):
            if file_sha256(path) != sums[name]:
                return f"{name!r} is not as it was written"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{SEAL!r} is not as it was written"
    return ""


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name != SEAL and not path.is_dir():
            yield name, path


def publish(source: Path, target: Path) -> None:
    """Move a staged file to its place in one step, replacing what was there."""
    with disk_errors(target.parent):
        sync(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        sync(target.parent)


SWITCH = ".switch"  # a folder of files that are about to take their places
_NEW = "new"
_GONE = "gone.json"


@contextmanager
def switch(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Replace files of a folder together: all of them, or none where the process is killed.

    Before the block ends, nothing in the folder has changed. Renaming what was staged is the
    switch; a process that is killed while it moves the files to their places leaves the rest for
    :func:`settle`.

    Yields:
        An empty folder for the new files, and a list for the names of files that are to go.

    Raises:
        InputError: the disk is full or broken.
        SpecError: the folder cannot be written.
    """
    settle(folder)
    with staging(folder) as staged:
        (staged / _NEW).mkdir()
        gone: list[str] = []
        yield staged / _NEW, gone
        (staged / _GONE).write_text(json.dumps(gone), encoding="utf-8")
        for path in (*staged.rglob("*"), staged):
            sync(path)
        staged.replace(folder / SWITCH)
        sync(folder)
        settle(folder)


def settle(folder: Path) -> None:
    """Finish the switch of a process that was killed; without one, nothing happens.

    Several processes may do so at once.

    Raises:
        ModelError: the switch is none of ours.
        InputError: the disk is full or broken.
        SpecError: the folder cannot be written.
    """
    pending = folder / SWITCH
    if not pending.is_dir():
        return
    subject = f"folder {str(folder)!r}"
    try:
        gone = read_json(pending / _GONE, subject, "has an unfinished switch that cannot be read")
    except ModelError:
        if pending.exists():
            raise
        return  # another process has finished it
    staged = sorted(path for path in (pending / _NEW).rglob("*") if not path.is_dir())
    names = [path.relative_to(pending / _NEW).as_posix() for path in staged]
    ours = isinstance(gone, list) and not pending.is_symlink() and not (pending / _NEW).is_symlink()
    if not ours or not all(_inside(folder, name) for name in (*names, *gone)):
        raise ModelError(
            subject,
            f"has an unfinished switch in {SWITCH!r} that no run of compressor made",
            "remove it, if you trust the folder's other files",
        )
    with disk_errors(folder):
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has moved it
                (pending / _NEW / name).replace(target)
            sync(target.parent)
        for name in gone:
            if (folder / name).is_file():
                (folder / name).unlink(missing_ok=True)
        sync(folder)
        with suppress(FileNotFoundError), staging(folder) as done:
            pending.replace(done / SWITCH)


def _inside(folder: Path, name: Any) -> bool:
    """Check that a name leads to a file in a folder, whatever links there are."""
    if not isinstance(name, str) or not all(map(is_file_name, name.split("/"))):
        return False
    with suppress(OSError):  # all of it may be too long
        if not (folder / SWITCH / _NEW / name).is_symlink():
            return (folder / name).parent.resolve().is_relative_to(folder.resolve())
    return False


def is_file_name(name: object) -> TypeGuard[str]:
    """Check that what a file gives as a name can be that of a file beside it."""
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        return False
    try:
        return "\0" not in name and len(os.fsencode(name)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def copy(source: Path, target: Path, *, link: bool = False) -> None:
    """Copy a file, or ``link`` it, where the file system has hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(target.parent):
        try:
            (os.link if link else shutil.copyfile)(source, target)
        except OSError as error:
            if not link or error.errno == errno.ENOSPC:
                raise
            shutil.copyfile(source, target)


def write_text(target: Path, text: str) -> None:
    """Write a text file in one step."""
    with staging(target.parent) as folder:
        staged = folder / target.name
        staged.write_text(text, encoding="utf-8")
        publish(staged, target)


def json_text(value: Any) -> str:
    """Return JSON for people and programs: indented, keys in the order given."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # A terminal would obey some that JSON leaves as they are.
    return "\n".join(map(_escaped, text.split("\n"))) + "\n"


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def json_sha256(value: Any) -> str:
    """Return the SHA-256 of a JSON value in a canonical form.

    >>> json_sha256({"a": 1, "b": 2}) == json_sha256({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(
    path: Path, subject: str, problem: str, remedy: str = _CUT, *, constants: bool = False
) -> Any:
    """Parse a JSON file; the arguments and errors are those of :func:`strict_json`.

    Raises:
        ModelError: it cannot be read, or is something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        unread = f"cannot be read ({error.strerror})"
        raise ModelError(subject, unread, "check its permissions") from error
    return strict_json(text, subject, problem, remedy, constants=constants)


def check_json_size(text: bytes, source: int | None = None) -> None:
    """Check that JSON takes no more memory than ten times the file that it is from, and 100 MB.

    A list of two bytes takes 64 of memory, and text at least 49. They are counted, before any is
    made, by the marks that begin them.

    Args:
        source: bytes of the file, if it holds the text compressed.

    Raises:
        ValueError: it takes more.
    """
    marks = ((b"[", 72), (b"{", 72), (b'"', 45), (b",", 16))
    takes = sum(weight * text.count(mark) for mark, weight in marks)
    if takes > _JSON_BYTES + 10 * (len(text) if source is None else source):
        raise ValueError(f"it would take {takes >> 20:,} MiB of memory")


def strict_json(
    text: bytes, subject: str, problem: str, remedy: str = _CUT, *, constants: bool = False
) -> Any:
    """Parse JSON that names nothing twice.

    >>> strict_json(b'{"a": 1}', "file 'x.json'", "cannot be read")
    {'a': 1}

    Args:
        text: UTF-8.
        subject: what the message is about.
        problem: what the message says of it, such as ``cannot be read``; the reason follows.
        remedy: what the message advises.
        constants: allow NaN and Infinity, which are not JSON.

    Raises:
        ModelError: it is something else.
    """
    try:
        check_json_size(text)
        constant = float if constants else _no_constant
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=constant)
        if b"\\u" in text:  # half of a surrogate pair would fail later, where it is written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise ModelError(subject, f"{problem} (as JSON: {reason})", remedy) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {twice!r} twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
