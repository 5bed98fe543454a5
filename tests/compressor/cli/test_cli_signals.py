"""Signals and closed pipes end the command line: one line, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Whoever runs the tests may ignore Ctrl-C, as a shell does for what runs in its background.
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import click
from compressor.cli import application
from compressor.cli.application import main
def work():
    {work}
application.application.add_command(click.Command("try", callback=work))
sys.argv = ["compress", "try"]
main()
"""


def start(work: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    code = PROGRAM.format(work=work)
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)


INTERRUPTED = b"interrupted\n"


def signalled(work: str, number: signal.Signals, after: float = 0.0) -> tuple[int, bytes, bytes]:
    """Send a signal to a process that says it is ready; return its code, output and errors."""
    with start(work) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(after)
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    return process.returncode, out, error


# A signal that comes just before one long sleep begins is seen only when that ends.
WAITING = "print('ready', flush=True); [time.sleep(0.1) for _ in range(600)]"

# What becomes of one that comes while a library imports a module of C++.
IMPORTING = f"""
    try:
        {WAITING}
    except KeyboardInterrupt:
        raise ImportError("initialization failed")"""


@pytest.mark.parametrize("work", [WAITING, IMPORTING])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_in_order(number: signal.Signals, work: str) -> None:
    assert signalled(work, number) == (130, b"", INTERRUPTED)


# C code that takes minutes and does not hold Python's lock.
LONG = "import hashlib; print('ready', flush=True); hashlib.pbkdf2_hmac('sha1', b'', b'', 10**9)"


def test_termination_ends_long_work_outside_of_python() -> None:
    assert signalled(LONG, signal.SIGTERM) == (130, b"", INTERRUPTED)


# C code that holds Python's lock, and looks for no signal.
DEAF = "import itertools; print('ready', flush=True); sum(itertools.repeat(0{times}))"


def test_termination_ends_work_that_holds_the_lock() -> None:
    # It takes a moment until it is deaf.
    ended = signalled(DEAF.format(times=""), signal.SIGTERM, after=0.2)
    assert ended == (-signal.SIGKILL, b"", INTERRUPTED)


SLOW_TO_DIE = """
import os, signal, socket, time
from compressor.cli import signals
arrived, send = socket.socketpair()
watched = os.getpid()
guard = os.fork()
if not guard:
    os.kill = lambda *_: None
    signals._guard(arrived, watched, lambda: os.write(2, b"interrupted\\n"))
send.send(bytes([signal.SIGTERM]))
time.sleep(0.6)
os.kill(guard, signal.SIGKILL)
"""


def test_a_process_that_is_slow_to_die_is_called_interrupted_once() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW_TO_DIE], capture_output=True, check=True)
    assert done.stderr == INTERRUPTED


SAVING = f"""
    from compressor.passes.train.watch import deferred_interrupts
    with deferred_interrupts() as interruption:
        {DEAF.format(times=", 5 * 10 ** 7")}
    print(interruption.wanted)"""


def test_what_saves_its_state_is_left_alone() -> None:
    assert signalled(SAVING, signal.SIGTERM) == (0, b"True\n", b"")


def test_a_second_interrupt_while_a_command_ends_shows_no_traceback() -> None:
    again = "import os; os.waitpid = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    with start(again) as process:
        assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == -signal.SIGINT


def test_no_process_is_left_of_a_command() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "compressor", "--version"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.wait(timeout=30) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os\nos.kill(os.getpid(), 2)\nimport time\n")
    code = "from compressor.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '.')}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("work", ["print('x' * 1000000)", "print('x')"])
def test_a_closed_pipe_is_no_news(work: str) -> None:
    with start(f"sys.stdin.readline(); {work}") as process:
        assert process.stdout is not None
        process.stdout.close()
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (141, b"")


# Cleaning up takes longer than a second signal to come.
CLEANING = """
    try:
        print('ready', flush=True); [time.sleep(0.1) for _ in range(600)]
    finally:
        time.sleep(1.0)
        print('cleaned', flush=True)"""


def test_a_second_termination_does_not_disturb_the_cleaning() -> None:
    with start(CLEANING) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (130, b"cleaned\n", INTERRUPTED)
