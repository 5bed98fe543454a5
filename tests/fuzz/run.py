"""Read changed files for a time, and remember how far that came: ``python -m tests.fuzz.run``.

An input is known by the seed, its reader and its number, and nothing else; ``--only`` makes a
single one again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.fuzz.corpus import make_corpus
from tests.fuzz.judge import Outside, changed_input, limit_this_process, start_clock, verdict
from tests.fuzz.readers import READERS, Reader

_BATCH = 400  # inputs of a process
_SLICE = 8.0  # seconds of a process


def main(arguments: Sequence[str] | None = None) -> int:
    """Continue where an earlier call ended; return 1 if any input ended badly."""
    options = _options(arguments)
    torch.set_num_threads(1)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus"
    if not corpus.is_dir():
        _make_corpus(corpus)
    if options.only:
        name, _, number = options.only.rpartition(":")
        return _once(_named(name), options.seed, int(number), corpus)
    log = folder / f"results-{options.seed}.jsonl"
    readers = [r for r in READERS if options.reader in ("", r.name)]
    slots = [readers[slot :: options.jobs] for slot in range(options.jobs)]
    until = time.monotonic() + options.seconds
    children = []
    for slot in slots:
        child = os.fork()
        if child == 0:
            try:
                _work(slot, options.seed, corpus, log, until)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return _summary(log, options.seed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reader", default="", help="only this one")
    parser.add_argument("--only", default="", help="a single input, as READER:NUMBER")
    parser.add_argument("--folder", type=Path, default=Path("out/fuzz"))
    return parser.parse_args(arguments)


def _named(name: str) -> Reader:
    return next(reader for reader in READERS if reader.name == name)


def _work(readers: Sequence[Reader], seed: int, corpus: Path, log: Path, until: float) -> None:
    """Take the readers in turn, each for a time."""
    reached = _reached(log)
    while time.monotonic() < until:
        for reader in readers:
            if time.monotonic() < until:
                start = reached[reader.name]
                reached[reader.name] = start + _batch(reader, seed, start, corpus, log)


def _batch(reader: Reader, seed: int, start: int, corpus: Path, log: Path) -> int:
    """Read inputs from one number on in a process of their own; return how many."""
    progress, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(progress)
        try:
            _inputs(reader, seed, start, corpus, send)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(progress, "rb") as stream:
        lines = stream.read().decode().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done = [line.partition("\t")[2] for line in lines if line.startswith("done")]
    problems = [[start + at, text] for at, text in enumerate(done) if text]
    count = len(done)
    if len(lines) % 2:  # one was begun and not finished
        problems.append([start + count, f"the process ended with {status}"])
        count += 1
    entry = {"reader": reader.name, "start": start, "count": count, "problems": problems}
    with log.open("a") as stream_out:
        stream_out.write(json.dumps(entry) + "\n")
    return count


def _inputs(reader: Reader, seed: int, start: int, corpus: Path, send: int) -> None:
    limit_this_process()
    # PyTorch makes its threads anew after a fork, and the second of two readers at once finds none.
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries of C++ print
    outside = Outside()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    work = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory)) / "input"
    tempfile.tempdir = str(work.parent)
    until = time.monotonic() + _SLICE
    try:
        for number in range(start, start + _BATCH):
            os.write(send, b"begun\n")
            start_clock()
            try:
                file = changed_input(reader, seed, number, corpus, work)
                problem = verdict(reader, number, file, work, outside)
            except Exception:  # noqa: BLE001 - of these tests themselves
                problem = f"not judged: {traceback.format_exc()[-300:]}"
            line = ascii(problem)[1:-1]
            os.write(send, f"done\t{line}\n".encode())
            if time.monotonic() > until:
                break
    finally:
        shutil.rmtree(work.parent, ignore_errors=True)


def _once(reader: Reader, seed: int, number: int, corpus: Path) -> int:
    """Make one input, keep it, and print how it ends."""
    work = Path(tempfile.mkdtemp(prefix="fuzz-")) / "input"
    file = changed_input(reader, seed, number, corpus, work)
    print(work / file, reader.call(number, file), flush=True)
    print(verdict(reader, number, file, work, Outside()) or "as it should")
    return 0


def _reached(log: Path) -> Counter[str]:
    reached: Counter[str] = Counter()
    for line in log.read_text().splitlines() if log.is_file() else ():
        entry = json.loads(line)
        reached[entry["reader"]] = max(reached[entry["reader"]], entry["start"] + entry["count"])
    return reached


def _summary(log: Path, seed: int) -> int:
    """Print the counts, and each problem once with its first input."""
    counts: Counter[str] = Counter()
    problems: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], int] = {}
    for line in log.read_text().splitlines() if log.is_file() else ():
        entry = json.loads(line)
        counts[entry["reader"]] += entry["count"]
        for number, text in entry["problems"]:
            problems[entry["reader"], text] += 1
            first.setdefault((entry["reader"], text), number)
    for name, count in counts.items():
        bad = sum(n for (reader, _), n in problems.items() if reader == name)
        print(f"{name:26} {count:8,} inputs  {bad:6,} bad")
    print(f"{'all':26} {counts.total():8,} inputs  {problems.total():6,} bad, seed {seed}")
    for (name, text), count in problems.most_common():
        print(f"{count:6} {name}:{first[name, text]}  {text}")
    return 1 if problems else 0


def _make_corpus(folder: Path) -> None:
    """Write the seeds in a process of its own, so that this one has no threads."""
    child = os.fork()
    if child == 0:
        make_corpus(folder)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("the corpus could not be made")


if __name__ == "__main__":
    sys.exit(main())
