"""Wings of the house can be taken down: their folder and their lines of a table, nothing else."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = ("catalog.py", "cli/application.py")

REMAINS = """
import importlib
import os
import sys
import traceback
from pathlib import Path

# What the package stands on is imported once; of the package itself, each child has its own copy.
import click
import onnx
import onnx_ir
import onnxruntime
import onnxscript
import pydantic
import torch


def stands(folder):
    sys.path[:0] = [str(folder)]
    os.chdir(folder)
    import compressor
    from compressor.cli.application import COMMANDS, application
    from compressor.run.timing import timing
    from compressor.spec.schema import spec_schema
    from tests.compressor.brief_timing import BRIEF
    from tests.compressor.tiny_project import onnx_project

    vars(timing).update(BRIEF)
    package = Path(compressor.__file__).parent
    assert package == folder / "compressor", package
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for name in COMMANDS:
        assert application.get_command(click.Context(application), name) is not None, name
    spec_schema()
    project = onnx_project(folder / "project")
    project.spec["passes"] = [{"pass": "fuse"}, {"pass": "quantize-static"}]
    project.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    return int(project.run().exit_code)


assert "compressor" not in sys.modules
for name in sys.argv[2:]:
    sys.stderr.flush()
    child = os.fork()
    if not child:
        code = 70
        try:
            code = stands(Path(sys.argv[1]) / name)
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print("END OF", name, file=sys.stderr, flush=True)
"""


@dataclass(frozen=True)
class Wing:
    """A part of the product that others do not need.

    Attributes:
        places: its files and folders, in the package.
        lines: beginnings of its lines in the tables of what there is.
    """

    places: tuple[str, ...]
    lines: tuple[str, ...] = ()


WINGS = {
    "archive": Wing(
        ("exporters/archive", "cli/unpack.py"),
        ('"archive": "compressor.exporters.archive.', '"unpack": '),
    ),
    "roofline": Wing(("lab/roofline", "report/pages/roofline.py")),
    "leave-one-out": Wing(("lab/explain/leave_one_out.py", "cli/explain.py"), ('"explain": ',)),
    "early-exit": Wing(("passes/train/early_exit",), ('"early-exit": ',)),
    "cluster": Wing(
        ("passes/quantize/cluster.py", "passes/quantize/maths/kmeans.py", "passes/train/archive"),
        ('"cluster": ', '"archive": "compressor.passes.train.archive.'),
    ),
}


def without(wing: Wing, folder: Path) -> None:
    """Copy the package into a folder, and leave a wing out."""
    copy = folder / "compressor"
    shutil.copytree(ROOT / "compressor", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for place in wing.places:
        path = copy / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone = []
    for table in TABLES:
        text = (copy / table).read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in text if not line.strip().startswith(wing.lines)]
        gone += [line for line in text if line not in kept]
        (copy / table).write_text("".join(kept), encoding="utf-8")
    assert len(gone) >= len(wing.lines), "a line of the wing was not found"


@pytest.fixture(scope="module")
def remains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Take down each wing in a process of its own; return exit codes and what was printed.

    The processes are forks of one that has imported the libraries, which takes seconds.
    """
    folder = tmp_path_factory.mktemp("wings")
    for name, wing in WINGS.items():
        (folder / name).mkdir()
        without(wing, folder / name)
    done = subprocess.run(
        [sys.executable, "-c", REMAINS, str(folder), *WINGS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    codes = dict(line.split() for line in done.stdout.splitlines())
    texts, rest = {}, done.stderr
    for name in WINGS:
        texts[name], _, rest = rest.partition(f"END OF {name}\n")
    return {name: (int(codes[name]), texts[name]) for name in WINGS}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINGS)
def test_a_wing_can_be_taken_down(name: str, remains: dict[str, tuple[int, str]]) -> None:
    code, text = remains[name]
    assert code == 0, text[-3000:]
