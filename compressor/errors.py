"""The exception tree. Every message has a subject, what is wrong with it, and a remedy."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from enum import IntEnum

_SHOWN = 2000  # characters


def argument(path: object) -> str:
    """Return a path as a shell takes it, for commands that people copy.

    >>> argument("my run")
    "'my run'"
    """
    return shlex.quote(str(path))


def printable(text: str, *, lines: bool = False) -> str:
    """Return text that may come from a file as it can be shown: nothing in it is obeyed.

    Control characters and those that turn the direction of writing are escaped, and what is very
    long is cut. Whatever prints or renders a page or a message calls this.

    >>> printable("\\x1b[31mred")
    '\\\\x1b[31mred'

    Args:
        lines: leave line breaks as they are, and cut each line by itself.
    """
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ExitCode(IntEnum):
    """Exit codes of the ``compress`` command; scripts depend on them."""

    DONE = 0
    LIMIT_FAILED = 1
    BAD_SPEC = 2
    BAD_INPUT = 3
    ARTIFACT_FAILED = 4
    INTERRUPTED = 130


class CompressorError(Exception):
    """Base of all errors that a user can cause and fix.

    Args:
        subject: what the error is about, such as ``layer 'fc'``.
        problem: what is wrong, with the offending value.
        remedy: what the user can do about it.
        where: place in a file the user wrote, such as ``spec.yaml:12``.
    """

    exit_code = ExitCode.BAD_SPEC

    def __init__(self, subject: str, problem: str, remedy: str, *, where: str | None = None):
        self.subject = subject
        self.problem = problem
        self.remedy = remedy
        self.where = where
        super().__init__(subject, problem, remedy)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.subject}: {self.problem}; {self.remedy}"

    def at(self, where: str) -> CompressorError:
        """Return this error with its place in a file set, unless it has one already."""
        if self.where is None:
            self.where = where
        return self


@contextmanager
def located(where: str) -> Iterator[None]:
    """Give errors that are raised inside their place in a file, unless they have one."""
    try:
        yield
    except CompressorError as error:
        error.at(where)
        raise


class SpecError(CompressorError):
    """The spec, an option or a path is wrong (exit 2)."""


class InputError(CompressorError):
    """A model, data or a file is unusable (exit 3)."""

    exit_code = ExitCode.BAD_INPUT


class FullDiskError(InputError):
    """There is no room for a file."""


class ModelError(InputError):
    """A checkpoint, module or graph is unusable."""


def run_failure(subject: str, reason: str) -> ModelError:
    """Return the error for a model that a runtime has opened and fails to run."""
    remedy = "check the inputs' shapes and dtypes in the spec"
    return ModelError(subject, f"does not run ({reason})", remedy)


class DataError(InputError):
    """Calibration, evaluation or training data is unusable."""


class ArtifactError(CompressorError):
    """An exported artifact failed its check (exit 4)."""

    exit_code = ExitCode.ARTIFACT_FAILED


@contextmanager
def artifact_errors(remedy: str = "") -> Iterator[None]:
    """Turn errors of a model into errors of the artifact, for files that we wrote.

    Args:
        remedy: what to do instead of what the error says.
    """
    try:
        yield
    except ModelError as error:
        raise ArtifactError(error.subject, error.problem, remedy or error.remedy) from error


def close_names(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the names nearest to ``name``, best first."""
    return get_close_matches(name, list(candidates), n=count, cutoff=0.5)


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a remedy: the nearest name, or the whole list where none is near.

    >>> suggestion("epoch", ["epochs", "batch"])
    "did you mean 'epochs'?"
    """
    names = list(names)
    near = close_names(name, names, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = ", ".join(sorted(names)[:12]) or "nothing"
    return f"there is: {shown}" + (" ..." if len(names) > 12 else "")


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names quoted, and how many more there are.

    >>> listed(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(n) for n in names[:limit])
    more = len(names) - limit
    return shown + (f" and {more} more" if more > 0 else "")


def message_lines(error: BaseException) -> list[str]:
    """Return the lines of an error's message that are not blank."""
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def not_finite(subject: str, what: str = "holds values") -> ModelError:
    """Return the error of weights that are NaN or infinite."""
    remedy = "the training diverged or the file is damaged; use an earlier checkpoint"
    return ModelError(subject, f"{what} that are NaN or infinite", remedy)


def first_line(error: BaseException) -> str:
    """Return how a library's message begins; the error's type where it has none."""
    return cut_line([*message_lines(error), type(error).__name__][0])


def last_line(error: BaseException) -> str:
    """Return where a library's message ends; the error's type where it has none."""
    return cut_line([type(error).__name__, *message_lines(error)][-1])


def cut_line(line: str) -> str:
    """Return a library's line, or of a very long one its first words.

    >>> cut_line("word " * 100)[-8:]
    'd word …'
    """
    return line if len(line) <= 300 else f"{line[:299].rpartition(' ')[0] or line[:299]} …"


def system_error(error: Exception) -> int:
    """Return the system's number of an error, which two libraries keep to themselves; 0 if none.

    >>> system_error(OSError("2000 requested and 767 written"))
    28
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if re.fullmatch(r"\d+ requested and \d+ written", str(error)):  # numpy says no more
        return errno.ENOSPC
    found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors
    return int(found[1]) if found else 0
