"""Stored results and published files appear whole or not at all."""

import errno
import json
import os
import random
import tempfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from compressor.errors import ExitCode, InputError, SpecError
from compressor.files import publish, remove_stale_staging, staging, write_text
from compressor.run.store import Store, result_key, store_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(store_of(tmp_path / "output"))


KEY, OTHER = result_key("test", "", n=1), result_key("test", "", n=2)


def entries(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_result_and_its_files_come_back(store: Store):
    assert store.read(KEY) is None
    with store.write(KEY) as (folder, result):
        (folder / "deep").mkdir()
        (folder / "deep" / "data.bin").write_bytes(b"abc")
        result.update(seconds=1.5, names=["a"])
    assert store.read(KEY) == {"seconds": 1.5, "names": ["a"]}
    assert (store.folder(KEY) / "deep" / "data.bin").read_bytes() == b"abc"
    assert store.read(OTHER) is None


def write_and_fail(store: Store, key: str, error: BaseException) -> None:
    with store.write(key) as (folder, result):
        (folder / "half").touch()
        result["n"] = 2
        raise error


def test_nothing_is_kept_of_a_block_that_fails(store: Store, tmp_path: Path):
    with store.write(KEY) as (_, result):
        result["n"] = 1
    for key, error in ((KEY, RuntimeError()), (OTHER, KeyboardInterrupt())):
        with pytest.raises(type(error)):
            write_and_fail(store, key, error)
    assert store.read(KEY) == {"n": 1}
    assert store.read(OTHER) is None
    assert [Path(e).name for e in entries(tmp_path)] == ["result.json", "seal.json"]


def begin(store: Store, error: BaseException) -> None:
    with store.write(KEY, resumable=True) as (folder, _):
        (folder / "first").write_bytes(b"1")
        raise error


def full_disk() -> InputError:
    error = InputError("folder", "is full", "free some space")
    error.__cause__ = OSError(errno.ENOSPC, "no space")
    return error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), full_disk()])
def test_a_resumable_result_goes_on(store: Store, error: BaseException):
    with pytest.raises(type(error)):
        begin(store, error)
    assert store.read(KEY) is None
    with store.write(KEY, resumable=True) as (folder, result):
        assert (folder / "first").read_bytes() == b"1"
        result["n"] = 1
    assert store.read(KEY) == {"n": 1}
    assert (store.folder(KEY) / "first").is_file()
    assert not store.partial(KEY).exists()


def test_a_resumable_result_that_cannot_be_is_dropped(store: Store):
    with pytest.raises(SpecError):
        begin(store, SpecError("layer", "is odd", "leave it out"))
    assert not store.partial(KEY).exists()


def test_a_result_is_replaced_as_a_whole(store: Store):
    with store.write(KEY) as (folder, result):
        (folder / "old").touch()
        result["n"] = 1
    with store.write(KEY) as (folder, result):
        (folder / "new").touch()
        result["n"] = 2
    assert sorted(p.name for p in store.folder(KEY).iterdir()) == [
        "new",
        "result.json",
        "seal.json",
    ]
    assert store.read(KEY) == {"n": 2}


def sealed_entry(store: Store) -> list[Path]:
    """Write an entry; return its files."""
    with store.write(KEY) as (folder, result):
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(random.Random(0).randbytes(100))
        result.update(seconds=1.5, layers=["conv1"])
    return [path for path in store.folder(KEY).rglob("*") if path.is_file()]


def test_each_flipped_bit_is_noticed(store: Store, tmp_path: Path):
    files = sealed_entry(store)
    root = store_of(tmp_path / "output")
    for file in files:
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 11):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert Store(root).read(KEY) is None, (file.name, bit)
        file.write_bytes(whole)
        assert Store(root).read(KEY) == {"seconds": 1.5, "layers": ["conv1"]}


@pytest.mark.parametrize("name", ["result.json", "seal.json", "model/weights.bin"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"a"', b"\xff", b"[" * 100_000, None])
def test_a_cut_entry_is_missing(store: Store, tmp_path: Path, name: str, content: bytes | None):
    sealed_entry(store)
    file = store.folder(KEY) / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    notes: list[str] = []
    later = Store(store_of(tmp_path / "output"), notes.append)
    assert later.read(KEY) is None
    assert later.read(KEY) is None
    (note,) = notes
    assert note.startswith(f"stored result .compressor/output/{KEY[:2]}/{KEY[2:]} is damaged (")
    assert note.endswith("): it is done again")
    with later.write(KEY) as (_, result):
        result["n"] = 2
    assert later.read(KEY) == {"n": 2}


def test_a_file_that_was_added_is_noticed(store: Store, tmp_path: Path):
    sealed_entry(store)
    (store.folder(KEY) / "model" / "more.pkl").touch()
    assert Store(store_of(tmp_path / "output")).read(KEY) is None


def test_infinity_is_refused_rather_than_stored(store: Store):
    with pytest.raises(ValueError, match="not JSON compliant"), store.write(KEY) as (_, result):
        result["n"] = float("inf")
    assert store.read(KEY) is None


def test_keys_depend_on_every_part_and_not_on_their_order():
    assert result_key("a", "b", x=1, y=2) == result_key("a", "b", y=2, x=1)
    keys = {
        result_key("a", "b", x=1),
        result_key("c", "b", x=1),
        result_key("a", "c", x=1),
        result_key("a", "b", x=2),
        result_key("a", "b", x="1"),
        result_key("a", "b", x=None),
        result_key("a", "b"),
    }
    assert len(keys) == 7


def test_keys_depend_on_the_versions_of_what_computes(monkeypatch: pytest.MonkeyPatch):
    from compressor.run import store as module

    before = result_key("a", "")
    monkeypatch.setattr(module, "compute_versions", lambda: {"torch": "99"})
    assert result_key("a", "") != before


def test_a_second_run_is_kept_out(store: Store, tmp_path: Path):
    root = store_of(tmp_path / "output")
    with store.locked():
        with pytest.raises(SpecError, match="in use by another run; wait for it") as caught:
            take(Store(root))
        assert str(tmp_path / "output") in str(caught.value)
    take(Store(root))


def take(store: Store) -> None:
    with store.locked():
        pass


def test_locking_removes_what_a_killed_process_left(store: Store, tmp_path: Path):
    root = store_of(tmp_path / "output")
    left = root / ".staging-abc"
    left.mkdir(parents=True)
    (left / "half").touch()
    with store.locked():
        assert not left.exists()


def test_forgetting_keeps_the_lock(store: Store, tmp_path: Path):
    with store.write(KEY) as (_, result):
        result["n"] = 1
    with store.locked():
        store.forget()
        assert store.read(KEY) is None
        with pytest.raises(SpecError, match="in use"):
            take(Store(store_of(tmp_path / "output")))


def test_text_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "report.md"
    write_text(target, "first\n")
    write_text(target, "zweiter – Bericht\n")
    assert target.read_text(encoding="utf-8") == "zweiter – Bericht\n"

    def fail(self: Path, other: Path) -> Path:
        assert (tmp_path / "report.md").read_text(encoding="utf-8") == "zweiter – Bericht\n"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InputError, match=r"is full .*free some space and run the same command"):
        write_text(target, "third\n")
    assert entries(tmp_path) == ["report.md"]


def stage_and_fail(parent: Path, number: int) -> None:
    with staging(parent) as folder:
        (folder / "half").touch()
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "kind", "code", "text"),
    [
        (errno.ENOSPC, InputError, ExitCode.BAD_INPUT, "is full"),
        (errno.EDQUOT, InputError, ExitCode.BAD_INPUT, "is full"),
        (errno.EFBIG, InputError, ExitCode.BAD_INPUT, "is full"),
        (errno.EACCES, SpecError, ExitCode.BAD_SPEC, "cannot be written"),
        (errno.EROFS, SpecError, ExitCode.BAD_SPEC, "cannot be written"),
        (errno.ENAMETOOLONG, SpecError, ExitCode.BAD_SPEC, "cannot be written"),
    ],
)
def test_failures_of_the_disk(
    tmp_path: Path, number: int, kind: type[Exception], code: ExitCode, text: str
):
    with pytest.raises(kind, match=text) as caught:
        stage_and_fail(tmp_path, number)
    assert caught.value.exit_code is code  # type: ignore[attr-defined]
    assert str(tmp_path) in str(caught.value)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError("200000 requested and 76768 written"),  # numpy's
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_libraries_that_keep_the_number_of_an_error_to_themselves(tmp_path: Path, error: Exception):
    with pytest.raises(InputError, match=r"is full \(No space left on device\)"), staging(tmp_path):
        raise error


def test_other_failures_of_the_system_are_not_called_a_full_disk(tmp_path: Path):
    with pytest.raises(OSError, match="Input/output error"):
        stage_and_fail(tmp_path, errno.EIO)
    assert entries(tmp_path) == []


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"cannot be written .*choose another output"):
        write_text(tmp_path / "file" / "below" / "report.json", "x")


def test_a_place_that_takes_no_folders_is_named_and_not_ours_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As /proc does; the message named a staging folder, which nobody has written."""

    def nowhere(prefix: str, dir: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(dir / f"{prefix}1"))

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    with pytest.raises(SpecError, match=f"^folder '{tmp_path}': cannot be written .No such file"):
        write_text(tmp_path / "gate.xml", "x")


def test_another_missing_file_is_not_taken_for_it(tmp_path: Path):
    with pytest.raises(FileNotFoundError), staging(tmp_path) as folder:
        (folder / "gone").read_bytes()


def test_publishing_makes_the_folder_and_replaces_what_was_there(tmp_path: Path):
    source, target = tmp_path / "staged", tmp_path / "sub" / "model.onnx"
    for content in (b"one", b"two"):
        source.write_bytes(content)
        publish(source, target)
        assert target.read_bytes() == content
        assert not source.exists()


def test_stale_staging_is_removed_and_nothing_else(tmp_path: Path):
    (tmp_path / ".staging-x").mkdir()
    (tmp_path / "staging").mkdir()
    (tmp_path / "kept.json").write_text(json.dumps(1))
    remove_stale_staging(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.json", "staging"]
