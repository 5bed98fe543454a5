"""Import of the user's modules, and the digest that says whether they changed."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from copy import copy
from fractions import Fraction
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

from compressor.errors import SpecError
from compressor.spec import user_code
from compressor.spec.user_code import code_digest, importable, load_symbol, reference_to

FILES = {
    "uc_model.py": "from uc_blocks import width\nimport uc_package.parts.deep\n\n"
    "class Net:\n    class Inner:\n        pass\n\n    def run(self): pass\n\n"
    "def build():\n    return width\n\nNUMBER = 3\n",
    "uc_blocks.py": "import json\n\nwidth = 4\n",
    "uc_unused.py": "x = 1\n",
    "uc_package/__init__.py": "",
    "uc_package/other.py": "y = 1\n",
    "uc_package/parts/__init__.py": "from . import shallow\n",
    "uc_package/parts/deep.py": "from ..sibling import z\n",
    "uc_package/parts/shallow.py": "q = 1\n",
    "uc_package/sibling.py": "z = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.startswith("uc_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def load(folder: Path, reference: str = "uc_model:build") -> Callable[..., object]:
    forget()
    with importable([folder]):
        return load_symbol(reference, "model.factory")


def test_a_function_and_names_inside_a_class(folder: Path):
    assert load(folder)() == 4
    assert load(folder, "uc_model:Net.Inner").__name__ == "Inner"
    assert load(folder, "uc_model:Net.run").__name__ == "run"


def test_the_path_is_searched_only_inside_the_block(folder: Path):
    before = list(sys.path)
    with importable([folder]):
        # What is installed comes first: a file of the user's hides no library.
        assert sys.path[: len(before)] == before
        assert sys.path.count(str(folder)) == 1
    assert sys.path == before


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "uc_model",
            "model.factory: 'uc_model' is not package.module:name; "
            "write it like my_package.model:build",
        ),
        (":build", "model.factory: ':build' is not package.module:name; "),
        ("uc_model:", "model.factory: 'uc_model:' is not package.module:name; "),
        (
            "uc_mode:build",
            "model.factory: 'uc_mode' does not import (ModuleNotFoundError: "
            "No module named 'uc_mode'); run from the folder that holds it, or install",
        ),
        (
            "uc_model:biuld",
            "model.factory: 'uc_model' has no 'biuld'; did you mean 'build'?",
        ),
        ("uc_model:Net.Iner", "model.factory: 'uc_model' has no 'Iner'; did you mean 'Inner'?"),
        (
            "uc_model:NUMBER",
            "model.factory: 'uc_model:NUMBER' is a int; name a function or a class",
        ),
    ],
)
def test_references_that_lead_nowhere(folder: Path, reference: str, message: str):
    with pytest.raises(SpecError) as caught:
        load(folder, reference)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import uc_gone", "ModuleNotFoundError"),
        ("def build(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys\nsys.exit(5)", "SystemExit: 5"),
    ],
)
def test_modules_that_do_not_import(folder: Path, source: str, kind: str):
    (folder / "uc_model.py").write_text(source)
    with pytest.raises(SpecError, match=rf"'uc_model' does not import \({kind}"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "uc_model.py",
        "uc_blocks.py",
        "uc_package/__init__.py",
        "uc_package/parts/deep.py",
        "uc_package/parts/__init__.py",
        "uc_package/parts/shallow.py",
        "uc_package/sibling.py",
    ],
)
def test_the_digest_follows_imports(folder: Path, name: str):
    before = code_digest(load(folder))
    assert code_digest(load(folder)) == before
    (folder / name).write_text((folder / name).read_text() + "# changed\n")
    assert code_digest(load(folder)) != before


@pytest.mark.parametrize("name", ["uc_unused.py", "uc_package/other.py", "uc_new.py"])
def test_the_digest_minds_nothing_else(folder: Path, name: str):
    before = code_digest(load(folder))
    (folder / name).write_text("changed = 1\n")
    assert code_digest(load(folder)) == before


def test_the_digest_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path: Path):
    before = code_digest(load(folder))
    moved = tmp_path / "moved"
    moved.mkdir()
    for entry in list(tmp_path.iterdir()):
        if entry != moved:
            entry.rename(moved / entry.name)
    assert code_digest(load(moved)) == before


def test_two_functions_of_a_module_differ(folder: Path):
    assert code_digest(load(folder)) != code_digest(load(folder, "uc_model:Net"))


def test_imports_inside_functions_count_before_they_run(folder: Path):
    text = "def build():\n    import uc_unused\n    return uc_unused.x\n"
    (folder / "uc_model.py").write_text(text)
    build = load(folder)
    before = code_digest(build)
    with importable([folder]):
        assert build() == 1
    assert code_digest(build) == before
    (folder / "uc_unused.py").write_text("x = 2\n")
    assert code_digest(build) != before


def test_modules_that_import_each_other(folder: Path):
    (folder / "uc_blocks.py").write_text("import uc_model\n\nwidth = 4\n")
    assert code_digest(load(folder))


def test_modules_in_other_folders_count(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """As of a repository that is installed in place, or on PYTHONPATH."""
    other = folder / "elsewhere" / "uc_library"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "nets.py").write_text("from .deeper import x\n")
    (other / "deeper.py").write_text("x = 1\n")
    (folder / "uc_model.py").write_text("from uc_library.nets import x\n\ndef build(): pass\n")
    monkeypatch.syspath_prepend(other.parent)
    before = code_digest(load(folder))
    assert code_digest(load(folder)) == before
    (other / "deeper.py").write_text("x = 2\n")
    assert code_digest(load(folder)) != before


def test_installed_libraries_count_by_their_version(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert code_digest(np.load) != code_digest(np.save)
    (folder / "uc_model.py").write_text("import yaml\nimport numpy\n\ndef build(): pass\n")
    function = load(folder)
    before = {f: code_digest(f) for f in (function, np.load)}
    monkeypatch.setattr(user_code, "version", lambda _: "99")
    user_code._version_of.cache_clear()
    assert all(code_digest(f) != digest for f, digest in before.items())
    user_code._version_of.cache_clear()


def test_a_function_without_a_file_is_told_by_its_code_and_what_it_holds():
    # As in a notebook. Of a function of this module, all that tests import would be parsed.
    notebook: dict[str, Any] = {"__name__": "notebook"}
    exec("def made(factor, held=None): return lambda value: (value * factor, held)", notebook)
    made = notebook["made"]
    digests = [code_digest(made(factor)) for factor in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]
    assert code_digest(made(1.0, made(1.0))) != code_digest(made(1.0, made(2.0)))
    assert code_digest(partial(made, 1.0)) == code_digest(partial(made, 1.0))
    assert code_digest(partial(made, 1.0)) != code_digest(partial(made, 2.0))
    # Of some objects nothing is known: then no result is taken for that of another.
    assert code_digest(made(1.0, Lock())) != code_digest(made(1.0, Lock()))


@pytest.mark.parametrize(
    ("first", "second"), [(np.zeros(3), np.ones(3)), (Fraction(1, 2), Fraction(1, 3)), (int, str)]
)
def test_what_a_function_of_a_notebook_finds_outside_counts(first: object, second: object):
    def digest(value: object) -> str:
        notebook: dict[str, Any] = {"__name__": "notebook", "MEAN": value}
        exec("def centred(batch): return batch - MEAN", notebook)
        return code_digest(notebook["centred"])

    assert digest(first) == digest(copy(first)) != digest(second)


def test_files_of_a_large_repository_are_parsed_once(folder: Path, monkeypatch):
    names = [f"uc_part{number}" for number in range(1100)]
    for name in names:
        (folder / f"{name}.py").write_text(f"NAME = '{name}'\n")
    (folder / "uc_model.py").write_text(f"def build():\n    import {', '.join(names)}\n")
    function = load(folder)
    before = code_digest(function)
    monkeypatch.setattr(ast, "parse", lambda *_: pytest.fail("a file is parsed again"))
    assert code_digest(function) == before


def test_imports_are_found_wherever_they_stand(folder: Path):
    text = """
class Net:
    def run(self, kind):
        with open(kind):
            for _ in kind:
                while kind:
                    import uc_a
        try:
            pass
        except OSError:
            import uc_b
        else:
            import uc_c
        finally:
            import uc_d
        match kind:
            case 1:
                import uc_e
            case _ if kind:
                from uc_package import other
        async def inner(): import uc_f
        if kind: pass
        elif kind: import uc_g
"""
    (folder / "uc_model.py").write_text(text)
    for letter in "abcdefg":
        (folder / f"uc_{letter}.py").write_text("x = 1\n")
    net = load(folder, "uc_model:Net")
    digests = {code_digest(net)}
    for file in (*(f"uc_{letter}.py" for letter in "abcdefg"), "uc_package/other.py"):
        (folder / file).write_text("x = 2\n")
        digests.add(code_digest(net))
    assert len(digests) == 9


def test_what_can_be_imported_has_a_reference():
    assert reference_to(code_digest) == "compressor.spec.user_code:code_digest"
    assert reference_to(lambda: 0) is None
    assert reference_to(partial(code_digest)) is None
    assert reference_to(5) is None


def test_an_object_that_a_spec_names_is_what_its_module_says(folder: Path):
    """Its digest was random, so that nothing was reused and no two runs could be compared."""
    path = folder / "uc_model.py"
    path.write_text(
        path.read_text() + "class Times:\n    def __init__(self, k): self.k = k\n"
        "    def __call__(self, x): return self.k * x\ntwice = Times(2)\nthrice = Times(3)\n"
    )
    twice = load(folder, "uc_model:twice")
    first = code_digest(twice)
    assert code_digest(twice) == first
    assert code_digest(load(folder, "uc_model:twice")) == first
    assert code_digest(load(folder, "uc_model:thrice")) != first
    made = type(twice)(2)  # by a program, which may have done anything to it
    assert code_digest(made) != code_digest(made)
    path.write_text(path.read_text().replace("Times(2)", "Times(4)"))
    assert code_digest(load(folder, "uc_model:twice")) != first
