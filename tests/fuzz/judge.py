"""Give one changed file to its reader, and judge how that ends."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random

from compressor.cli.application import application
from compressor.errors import CompressorError
from tests.fuzz.readers import Reader

SECONDS = 20
_CODES = (0, 1, 2, 3, 4)
_MORE = 200 << 20  # bytes of memory, beyond ten times the input
_ROOM = 24 << 30  # of addresses, most of which are never used
_LONGEST = 50_000  # characters of messages
_STATUS = Path("/proc/self/status")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Outside:
    """Remembers files that were written outside a folder, and processes that were started."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, _, flags = args
            written = isinstance(flags, int) and flags & _WRITES
            if written and isinstance(path, str | bytes | os.PathLike):
                self._check(os.fsdecode(path))
        elif event in ("os.remove", "os.mkdir"):
            self._check(os.fsdecode(args[0]))  # type: ignore[arg-type]
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._check(os.fsdecode(args[1]))  # type: ignore[arg-type]
        elif event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            self.seen.append(event)

    def _check(self, path: str) -> None:
        if not path.startswith("/"):  # in a folder that is open
            return
        place = str(Path(path).resolve())
        inside = place.startswith((self.folder, "/dev/")) or "/compressor-" in place
        if not inside and not place.endswith((".pyc", "__pycache__")):
            self.seen.append(f"{place} was written")


def changed_input(reader: Reader, seed: int, number: int, corpus: Path, work: Path) -> str:
    """Write an input into an empty folder, and return the name of the file that is changed."""
    rng = Random(f"{seed} {reader.name} {number}")
    file = rng.choice(reader.files)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(corpus / reader.folder, work)
    path = work / file
    path.write_bytes(reader.mutate(rng, path.read_bytes()))
    reader.after(work)
    return file


def verdict(
    reader: Reader, number: int, file: str, work: Path, outside: Outside | None = None
) -> str:
    """Read an input; return what is wrong with how that ends, and nothing if it is as it should."""
    call = reader.call(number, file)
    size = sum(p.stat().st_size for p in work.rglob("*") if p.is_file())
    out, err = io.StringIO(), io.StringIO()
    before = _reset_peak()
    if outside is not None:
        outside.folder, outside.seen = str(work), []
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if callable(call):
                call(work)
            else:
                application.main(args=["--debug", *(w.replace("{}", str(work)) for w in call)])
        except SystemExit as end:
            code = end.code
        except CompressorError as error:
            code = int(error.exit_code)
        except Exception:  # noqa: BLE001 - what else there is, is what is looked for
            err.write(f"internal error\n{traceback.format_exc()}")
    if outside is not None:
        outside.folder = ""
    peak = _kib("VmHWM") * 1024
    shown, said = out.getvalue(), err.getvalue()
    if "internal error" in said:
        return _last_frame(said)
    if code not in _CODES:
        return f"exit code {code}"
    lines = (line for text in (shown, _messages(said)) for line in text.split("\n"))
    if not all(line.isprintable() for line in lines):
        return "control characters are printed"
    if len(_messages(said)) > _LONGEST:
        return f"{len(said)} characters of messages"
    if outside is not None and outside.seen:
        return outside.seen[0]
    if peak - before > 10 * size + _MORE:
        return f"{(peak - before) >> 20} MiB of memory for {size} bytes"
    return ""


def _messages(said: str) -> str:
    """Return the lines that begin as messages do; --debug prints tracebacks before them."""
    return "\n".join(line for line in said.split("\n") if line.startswith(("error:", "internal")))


def _last_frame(said: str) -> str:
    """Shorten a traceback to the error and the last place of ours."""
    lines = [line.strip() for line in said.split("\n")]
    ours = [line for line in lines if line.startswith("File") and "/compressor/" in line]
    errors = [line for line in lines if line.startswith("internal error:")] or lines[-2:-1]
    place = ours[-1].partition("/compressor/")[2] if ours else ""
    return f"{errors[-1][:160]!r} at {place}"


def limit_this_process() -> None:
    """End this process where an input takes too long, or far too much memory."""
    resource.setrlimit(resource.RLIMIT_AS, (_ROOM, _ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def start_clock() -> None:
    """Allow the next input its seconds: of processor time, and more of waiting."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _kib("VmRSS") * 1024


def _kib(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise ValueError(key)
