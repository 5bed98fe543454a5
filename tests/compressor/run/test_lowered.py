"""The graph of a PyTorch module is kept: lowering happens once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from compressor.errors import SpecError
from compressor.models.torch import carrier as torch_carrier
from compressor.models.torch.lowering import lower
from tests.compressor.tiny_project import MODULE, Project

FLOAT = ir.AttributeType.FLOAT


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with every module that is lowered."""
    done: list[object] = []

    def counted(module: Any, inputs: Any) -> Any:
        done.append(module)
        return lower(module, inputs)

    monkeypatch.setattr(torch_carrier, "lower", counted)
    return done


def kept(project: Project) -> list[Path]:
    return list(project.store.rglob("lowered.onnx"))


def test_the_run_finds_the_graph_that_the_plan_kept(on_torch: Project, lowerings: list[object]):
    on_torch.run()
    artifacts = on_torch.artifacts()
    shutil.rmtree(on_torch.output.parent)
    on_torch.plan().model.keep_graph()
    assert len(lowerings) == 2
    assert len(kept(on_torch)) == 1
    on_torch.run()
    on_torch.run("passes=[{pass: fuse}]")
    assert len(lowerings) == 2
    on_torch.run(fresh=True)
    assert len(kept(on_torch)) == 1
    assert on_torch.artifacts() == artifacts


def test_it_is_the_same_graph(on_torch: Project, lowerings: list[object]):
    made = on_torch.plan().model
    made.keep_graph()
    found = on_torch.plan().model
    assert len(lowerings) == 1
    graph, again = made.carrier.graph().graph, found.carrier.graph().graph
    assert [(n.op_type, n.name) for n in graph] == [(n.op_type, n.name) for n in again]
    assert list(graph.initializers) == list(again.initializers)
    numbers = [
        [a.value for node in nodes for a in node.attributes.values() if a.type == FLOAT]
        for nodes in (graph, again)
    ]
    assert numbers[0] == numbers[1], "not rounded to the float32 of an ONNX file"
    assert 1e-5 in numbers[0]
    found.load()
    weights = found.carrier.module.state_dict()  # type: ignore[attr-defined]  # it is a module's
    for name, value in again.initializers.items():
        assert value.const_value is not None
        assert value.shape == graph.initializers[name].shape
        if name in weights:
            assert (value.const_value.numpy() == weights[name].numpy()).all()


def test_a_damaged_graph_counts_as_missing(on_torch: Project, lowerings: list[object]):
    on_torch.plan().model.keep_graph()
    (path,) = kept(on_torch)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    made = on_torch.plan().model
    assert len(lowerings) == 2
    notes: list[str] = []
    made.keep_graph(notes.append)
    (note,) = notes
    assert "is damaged ('lowered.onnx' is not as it was written): it is done again" in note


def test_another_module_has_another_graph(on_torch: Project, lowerings: list[object]):
    on_torch.plan().model.keep_graph()
    source = on_torch.folder / f"{MODULE}.py"
    source.write_text(source.read_text() + "\n# another version\n")
    on_torch.plan()
    assert len(lowerings) == 2


def test_a_folder_of_somebody_else_stays_as_it_is(on_torch: Project):
    on_torch.output.mkdir(parents=True)
    (on_torch.output / "notes.txt").write_text("mine")
    on_torch.plan().model.keep_graph()
    assert [path.name for path in on_torch.output.iterdir()] == ["notes.txt"]


def test_a_plan_that_fails_leaves_nothing(on_torch: Project):
    on_torch.spec["passes"] = [{"pass": "quantize-static", "layers": [{"match": "*"}]}]
    del on_torch.spec["data"]["calibration"]
    with pytest.raises(SpecError, match="calibration"):
        on_torch.plan()
    assert not on_torch.output.exists()
