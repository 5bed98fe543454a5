"""The distribution has one top-level name, so files of the user's own may have any other."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.compressor.tiny_project import onnx_project
from tests.paths import ROOT

# Names of our folders, and of one file of the standard library.
OWN = ("calibration", "passes", "exporters", "graph", "report", "types")
# In the folder itself `types` is the standard library's, as in every Python program; inside a
# package of the user's own it is theirs.
TRANSFORM = {
    "plain": (OWN[:-1], "import {name}"),
    "package": (OWN, "from own import {name}"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built from a copy of what is tracked and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "compressor", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_beside_own_files(folder: Path, form: str, site: Path) -> subprocess.CompletedProcess[str]:
    """Run a spec from a folder with files of our folders' names, imported by its transform."""
    names, statement = TRANSFORM[form]
    project = onnx_project(folder)
    place = folder / "own" if form == "package" else folder
    place.mkdir(exist_ok=True)
    for name in OWN:
        (place / f"{name}.py").write_text("halved = lambda image: image / 2\n")
    lines = [statement.format(name=name) for name in names]
    lines += ["def halve(batch):", "    image = batch['image']"]
    lines += [f"    assert ({name}.halved(image) == image / 2).all()" for name in names]
    lines += [f"    return {{**batch, 'image': {names[0]}.halved(image)}}"]
    (place / "preprocessing.py").write_text("\n".join(lines) + "\n")
    module = "own.preprocessing" if form == "package" else "preprocessing"
    for source in project.spec["data"].values():
        source["transform"] = f"{module}:halve"
    command = [sys.executable, "-P", "-m", "compressor", "run", str(project.path)]
    # "-P": as the installed command does, which looks for modules beside itself.
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("form", TRANSFORM)
@pytest.mark.slow
def test_files_of_the_users_own_may_have_our_folders_names(tmp_path: Path, form: str):
    site = tmp_path / "site"
    site.mkdir()
    (site / "compressor").symlink_to(ROOT / "compressor")
    done = run_beside_own_files(tmp_path / "project", form, site)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "project/out/tiny/model.onnx").is_file()


@pytest.mark.parametrize("form", ["plain", pytest.param("package", marks=pytest.mark.slow)])
def test_the_same_holds_for_the_installed_wheel(tmp_path: Path, form: str, wheel: Path):
    done = run_beside_own_files(tmp_path / "project", form, wheel)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "project/out/tiny/model.onnx").is_file()


def test_the_wheel_has_one_top_level_name(wheel: Path):
    places = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert places == {"compressor"}
    (listed,) = wheel.glob("*.dist-info/top_level.txt")
    assert listed.read_text().split() == ["compressor"]
    data = {path.suffix for path in (wheel / "compressor" / "report").rglob("*") if path.is_file()}
    assert {".html", ".css", ".js"} <= data


def test_the_wheel_says_what_it_is(wheel: Path):
    assert (wheel / "compressor" / "py.typed").is_file()  # or checkers ignore all types
    assert (wheel / "compressor" / "spec" / "schema.json").is_file()
    (folder,) = wheel.glob("*.dist-info")
    (licence,) = folder.rglob("LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    metadata = message_from_string((folder / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [c for c in classifiers if c.startswith("License")], "the expression says it"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"gguf", "openvino", "tensorboard", "tensorrt", "transformers"} <= extras
