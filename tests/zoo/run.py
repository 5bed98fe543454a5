"""Runs the zoo: python -m tests.zoo.run [--all] [--again] [--for MINUTES] [--jobs N] [CASE ...]

Each case has a process of its own with limits of time and memory. Its result is one line of
``out/zoo/results.jsonl``; cases that have one there, or in ``kept.jsonl`` beside this file, are not
run again, so that the same command goes on where it was stopped, also on another machine. A case
that is named is run again, and with --again each. Without --all, those apart are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

# Before PyTorch is imported: a process with threads cannot be forked.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())  # ultralytics writes settings

from compressor.models.torch.translations import translations
from compressor.spec.user_code import code_digest
from tests.paths import ROOT
from tests.zoo import models, one
from tests.zoo.cases import Case, cases

FOLDER = ROOT / "out" / "zoo"
RESULTS = FOLDER / "results.jsonl"
KEPT = Path(__file__).with_name("kept.jsonl")  # written with the page
_CPU_SECONDS, _WALL_SECONDS = 720, 2400  # against endless work, also on a slow machine
_WARMING = "transformers/llama"  # of three layers; its directory imports most that others need
_BYTES = 5 << 30
_POLL = 0.25
_NUMBER = struct.Struct("i")


def results() -> dict[str, dict[str, Any]]:
    """Return the last line of each case."""
    files = [file for file in (KEPT, RESULTS) if file.exists()]
    texts = [text for file in files for text in file.read_text(encoding="utf-8").splitlines()]
    lines = [json.loads(text) for text in texts]
    return {line["case"]: line for line in lines}


def keep() -> None:
    """Write the last line of each case into ``kept.jsonl``, ordered by name."""
    lines = sorted(results().items())
    KEPT.write_text("".join(json.dumps(line) + "\n" for _, line in lines), encoding="utf-8")


def run(case: Case) -> dict[str, Any]:
    """Take a case through its cells, and through those after one that had to be killed."""
    folder = FOLDER / "cases" / case.name.replace("/", "-").replace(".", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "cells.jsonl"
    cells: dict[str, Any] = {}
    begun = time.time()
    while True:
        killed = _child(case, folder, log, set(cells))
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if "cell" in line:
                cells[line.pop("cell")] = line
        last = lines[-1].get("begins") if lines else "source"
        if not killed or last is None:
            break
        cells[last] = {"killed": killed}
        log.write_text("")
        if last == "source":
            break
    shutil.rmtree(folder)
    return {
        "case": case.name,
        "kind": case.kind,
        "date": date.today().isoformat(),
        "seconds": round(time.time() - begun),
        "processor": processor(),
        "cells": cells,
    }


def _child(case: Case, folder: Path, log: Path, skip: set[str]) -> str:
    """Run a case in a process of its own; return why it ended early, if it did."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            _inside(case, folder, log, skip)
        finally:
            os._exit(0)
    ends = time.monotonic() + _WALL_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        reason = "memory" if _memory(child) > _BYTES else "time" if time.monotonic() > ends else ""
        if reason:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return reason
        time.sleep(_POLL)
    if not os.WIFSIGNALED(status):
        return ""
    number = os.WTERMSIG(status)
    return "time" if number == signal.SIGXCPU else signal.Signals(number).name


def _inside(case: Case, folder: Path, log: Path, skip: set[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 5))
    quiet = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(folder)  # some libraries leave files where they are
    with log.open("a", encoding="utf-8") as file:
        for line in one.take(case, folder, skip):
            file.write(json.dumps(line) + "\n")
            file.flush()


def _preload() -> None:
    """Do once what every process would repeat: imports, tables of operators, caches of tracing.

    A case is planned and exported here. That is a third of the time that the next one takes.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    translations()  # what it adds to the table
    table = ONNXRegistry.from_torchlib()
    ONNXRegistry.from_torchlib = staticmethod(lambda *_, **__: table)  # type: ignore[method-assign]
    (case,) = (case for case in cases() if case.name == _WARMING)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        work = one.Work(case, Path(folder))
        one.plan(work)
        one.export(work)
        code_digest(models.build)  # parses the sources that networks are made with
        os.chdir(before)
    # What is there stays: a process neither visits it nor copies its pages to do so.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def processor() -> str:
    """Return what latencies in int8 depend on: the processor, and if it adds products of bytes."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"model name\s*:\s*(.*)", text)
    return f"{name[1] if name else 'unknown'}, {'VNNI' if 'vnni' in text else 'no VNNI'}"


def _memory(process: int) -> int:
    """Return the bytes that a process holds."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):  # it has just ended
        return 0
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description="run the zoo")
    parser.add_argument("--for", dest="minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="those apart, too")
    parser.add_argument("--again", action="store_true", help="those with a result, too")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    done = {} if options.again else results()
    table = {case.name: case for case in cases()}
    offered = [name for name, case in table.items() if options.all or not case.apart]
    left = [name for name in offered if name not in done]
    wanted = [table[name] for name in options.cases or left]
    FOLDER.mkdir(parents=True, exist_ok=True)
    _preload()
    begun = time.monotonic()
    queue, filled = os.pipe()
    os.write(filled, b"".join(_NUMBER.pack(n) for n in range(len(wanted))))
    os.close(filled)
    others = []
    for _ in range(1, options.jobs):
        others.append(os.fork())
        if not others[-1]:
            _run_next(wanted, queue, ends)
            os._exit(0)
    _run_next(wanted, queue, ends)
    for process in others:
        os.waitpid(process, 0)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


def _run_next(wanted: Sequence[Case], queue: int, ends: float) -> None:
    """Run cases whose numbers come from a queue that other processes read, too."""
    while number := os.read(queue, _NUMBER.size):
        (place,) = _NUMBER.unpack(number)
        if time.monotonic() > ends:
            print(f"{len(wanted) - place} cases are left; the same command goes on", flush=True)
            while os.read(queue, 1 << 16):
                pass
            break
        line = run(wanted[place])
        file = os.open(RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        text = re.sub(rf"{ROOT}/[^\s\"]*/", "", json.dumps(line))  # no folders of this machine
        os.write(file, f"{text}\n".encode())  # whole, beside another process
        os.close(file)
        print(f"[{place + 1}/{len(wanted)}] {shown(line)}", flush=True)


def shown(line: dict[str, Any]) -> str:
    """Return a case's result as a line for the terminal."""
    cells = []
    for name, cell in line["cells"].items():
        value = cell.get("db", cell.get("reload_db", cell.get("share", "")))
        problem = cell.get("failed") or cell.get("killed") or cell.get("message") or ""
        if name != "source" or problem:
            cells.append(f"{name} {problem[:90] if problem else value or 'ok'}")
    return f"{line['case']} ({line['seconds']} s): " + "; ".join(cells)


if __name__ == "__main__":
    main()
