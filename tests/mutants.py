"""Print what a mutation run found: a score for each file, and with ``--list`` who survived.

``make mutants`` runs mutmut over the files that pyproject.toml names and then this. Mutants of
texts with a space in them are counted apart: they are messages, and nobody's decision rests on one.
"""

import re
import sys
from collections import Counter
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

CAUGHT = {"killed", "timeout", "segfault", "suspicious"}
COLUMNS = ("mutants", "caught", "missed", "messages", "not run")
TEXT = re.compile(r'"[^"]*"')


def changed(path: str, mutant: str) -> tuple[str, str]:
    """Return the lines that a mutant takes out, and those it puts in their place."""
    lines = get_diff_for_mutant(mutant, path=path).splitlines()[2:]
    return tuple("\n".join(x[1:].strip() for x in lines if x.startswith(sign)) for sign in "-+")  # type: ignore[return-value]


def is_message(old: str, new: str) -> bool:
    """Return whether only a text with a space in it differs."""
    texts = [t for t in TEXT.findall(old) if t not in TEXT.findall(new)]
    return TEXT.sub("", old) == TEXT.sub("", new) and bool(texts) and all(" " in t for t in texts)


def main() -> None:
    """Print the table, and the lines of survivors if asked for."""
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
