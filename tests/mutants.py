"""Plant small bugs one at a time, run the tests, and print how many bugs they catch.

``make mutants`` calls this with ``run``. mutmut plants the bugs in the files that pyproject.toml
names, and goes on where it was. Without ``run``, the results that there are get printed: a score
for each file, and with ``--list`` who survived. Mutants of texts with a space in them are counted
apart: they are messages, and nobody's decision rests on one.
"""

import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import mutmut.__main__ as mutmut
import pytest
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import change_cwd
from mutmut.workers.isolation import ForkServerRunner

CAUGHT = {"killed", "timeout", "segfault", "suspicious"}
COLUMNS = ("mutants", "caught", "missed", "messages", "not run")
TEXT = re.compile(r'"[^"]*"')
PROCESSES = 2


class OfOneSession(PytestRunner):
    """Runs a mutant's tests in a session that is open already, the fastest first."""

    def __init__(self, session: pytest.Session):
        super().__init__()
        self._session = session
        seconds = state().duration_by_test
        ordered = sorted(session.items, key=lambda item: seconds.get(item.nodeid, 0.0))
        self._items = {item.nodeid: (place, item) for place, item in enumerate(ordered)}

    def warm_up(self) -> None:
        """Keep what is collected from being looked at, and so copied, by each mutant's process."""
        gc.collect()
        gc.freeze()

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:  # noqa: ARG002
        """Return 1 as soon as one fails, else 0."""
        items = [item for _, item in sorted(self._items[n] for n in tests if n in self._items)]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return 1
        return 0


class OneSession(ForkServerRunner):
    """Starts pytest once, and not for each mutant, which takes longer than most tests."""

    def run_clean_tests(self, tests: Iterable[str]) -> int:  # noqa: ARG002
        """Run nothing: all tests have passed when their times were taken."""
        return 0

    def _forkserver_main(self, work_fd: int, result_fd: int) -> None:
        serve = super()._forkserver_main

        class Serving:
            @pytest.hookimpl(tryfirst=True)
            def pytest_runtestloop(_, session: pytest.Session) -> bool:  # noqa: N805
                first, *_, last = session.items
                # What is set up for the session stays for all processes.
                first.ihook.pytest_runtest_protocol(item=first, nextitem=last)
                self.test_runner_class, self.test_runner_args = OfOneSession, {"session": session}
                serve(work_fd, result_fd)
                return True

        runner = PytestRunner()
        arguments = [*runner._pytest_args_regular_run(()), "-otmp_path_retention_policy=failed"]
        with change_cwd("mutants"):
            runner.execute_pytest(arguments, plugins=[Serving()])


def run() -> None:
    """Run what has no result yet."""
    show, last = mutmut.print_stats, [0.0]

    def shown_each_second(*given: object, **named: object) -> None:  # it counts all mutants anew
        if time.monotonic() > last[0] + 1 or named:
            last[0] = time.monotonic()
            show(*given, **named)

    mutmut.print_stats = shown_each_second
    mutmut.get_mutant_runner = lambda processes: OneSession(processes, PytestRunner, {})
    mutmut._run((), PROCESSES)


def changed(path: str, mutant: str) -> tuple[str, str]:
    """Return the lines that a mutant takes out, and those it puts in their place."""
    lines = get_diff_for_mutant(mutant, path=path).splitlines()[2:]
    return tuple("\n".join(x[1:].strip() for x in lines if x.startswith(sign)) for sign in "-+")  # type: ignore[return-value]


def is_message(old: str, new: str) -> bool:
    """Return whether only a text with a space in it differs."""
    texts = [t for t in TEXT.findall(old) if t not in TEXT.findall(new)]
    return TEXT.sub("", old) == TEXT.sub("", new) and bool(texts) and all(" " in t for t in texts)


def main() -> None:
    """Run mutants if asked for; print the table, and the lines of survivors if asked for."""
    if "run" in sys.argv:
        run()
    width = max(map(len, config().only_mutate))
    print("".ljust(width), *(c.rjust(8) for c in COLUMNS), "   score")
    total: Counter[str] = Counter()
    for path in config().only_mutate:
        data = SourceFileMutationData(path=Path(path))
        data.load()
        counts: Counter[str] = Counter()
        for mutant, code in data.exit_code_by_key.items():
            status = status_by_exit_code[code]
            if status in CAUGHT:
                counts["caught"] += 1
            elif status not in ("survived", "no tests"):
                counts["not run"] += 1
            elif is_message(*(lines := changed(path, mutant))):
                counts["messages"] += 1
            else:
                counts["missed"] += 1
                if "--list" in sys.argv:
                    print(f"\n{mutant} ({status})\n- {lines[0]}\n+ {lines[1]}")
        counts["mutants"] = len(data.exit_code_by_key)
        total += counts
        print_row(path.ljust(width), counts)
    print_row("all".ljust(width), total)


def print_row(name: str, counts: Counter[str]) -> None:
    """Print a line of the table."""
    judged = counts["caught"] + counts["missed"]
    score = f"{100 * counts['caught'] / judged:6.1f} %" if judged else "       -"
    print(name, *(str(counts[c]).rjust(8) for c in COLUMNS), score)


if __name__ == "__main__":
    main()
