"""The distribution has one top-level name, so files of the user's own may have any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
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


HOME = "https://example.org/owner/compressor"


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built from a copy of what is tracked."""
    return built(tmp_path_factory.mktemp("wheel"), HOME)


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> Path:
    """The distribution, unpacked."""
    site = wheel_file.with_name("site")
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(site)
    return site


def built(folder: Path, home: str) -> Path:
    """Build the distribution for a repository's address, which may be empty."""
    copy = folder / "source"
    copy.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "compressor", "pyproject.toml", "setup.py", "README.md", "LICENSE"],
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
    environment = {**os.environ, "COMPRESSOR_HOME": home}
    subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, check=True, capture_output=True
    )
    (made,) = folder.glob("*.whl")
    return made


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


def metadata_of(site: Path) -> Message:
    (file,) = site.glob("*.dist-info/METADATA")
    return message_from_string(file.read_text(encoding="utf-8"))


def targets(metadata: Message) -> list[str]:
    """Return where the links and pictures of an index's page lead."""
    return re.findall(r"\]\(([^)]+)\)", str(metadata.get_payload()))


def test_the_index_shows_pictures_and_links_of_the_repository(wheel: Path):
    metadata = metadata_of(wheel)
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert f"{HOME}/raw/main/docs/report.png" in targets(metadata)
    assert all(target.startswith(HOME) for target in targets(metadata))
    for target in targets(metadata):
        assert (ROOT / target.partition("/main/")[2].partition("#")[0]).exists(), target


@pytest.mark.slow
def test_without_an_address_the_index_shows_nothing_broken(tmp_path: Path):
    with zipfile.ZipFile(built(tmp_path, "")) as archive:
        archive.extractall(tmp_path / "site")
    metadata = metadata_of(tmp_path / "site")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert targets(metadata) == []
    assert "Project-URL" not in metadata
    assert "user guide" in str(metadata.get_payload()).lower()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_runs_in_an_environment_of_its_own(tmp_path: Path, wheel_file: Path):
    """Installed with the dependencies that it names and no others, on a model of the user's."""
    python = tmp_path / "environment" / "bin" / "python"
    steps = [
        [sys.executable, "-m", "venv", str(tmp_path / "environment")],
        # The constraints choose a build of PyTorch without CUDA; dependencies are the wheel's own.
        [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"),
         str(wheel_file)],
        [str(python), "-m", "pip", "check"],
        [str(python.with_name("compress")), "doctor"],
    ]  # fmt: skip
    project = onnx_project(tmp_path / "project")
    project.spec["passes"] = [{"pass": "fuse"}, {"pass": "quantize-static"}]
    project.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    steps.append([str(python.with_name("compress")), "run", str(project.path)])
    loads = f"import compressor; compressor.load({str(project.folder / 'out/tiny')!r})"
    steps.append([str(python), "-c", loads])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    for step in steps:
        done = subprocess.run(
            step, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (step, done.stdout[-2000:], done.stderr[-2000:])


def test_the_wheel_says_what_it_is(wheel: Path):
    assert (wheel / "compressor" / "py.typed").is_file()  # or checkers ignore all types
    assert (wheel / "compressor" / "spec" / "schema.json").is_file()
    (licence,) = wheel.glob("*.dist-info/**/LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    metadata = metadata_of(wheel)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [c for c in classifiers if c.startswith("License")], "the expression says it"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"gguf", "openvino", "tensorboard", "tensorrt", "transformers"} <= extras
