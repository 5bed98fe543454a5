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
import sys
from pathlib import Path

import click

import compressor
from compressor.cli.application import COMMANDS, application
from compressor.spec.schema import spec_schema
from tests.compressor.tiny_project import onnx_project

package, folder = Path(compressor.__file__).parent, Path(sys.argv[1])
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
raise SystemExit(int(project.run().exit_code))
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
        ("passes/quantize/cluster.py", "passes/quantize/maths/kmeans.py"), ('"cluster": ',)
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


@pytest.mark.parametrize("name", WINGS)
def test_a_wing_can_be_taken_down(name: str, tmp_path: Path) -> None:
    without(WINGS[name], tmp_path)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", REMAINS, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
