"""An exported ONNX file in a web page: ONNX Runtime's WebAssembly build, in a real Chromium.

The build is npm's package ``onnxruntime-web``, in the folder that COMPRESSOR_WEB names:
``npm install onnxruntime-web`` makes ``node_modules`` in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import compressor
from samples.digits.data import normalize
from tests.compressor.report.test_browser import browser  # noqa: F401 - a fixture
from tests.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DIGITS = ROOT / "samples" / "digits"
PAGE = """<!doctype html><title>digits</title><script src="web/ort.wasm.min.js"></script><script>
async function answers(values, shape) {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("web/", location.href).href;
  const session = await ort.InferenceSession.create("model.onnx", {executionProviders: ["wasm"]});
  const image = new ort.Tensor("float32", Float32Array.from(values), shape);
  const outputs = await session.run({[session.inputNames[0]]: image});
  const found = outputs[session.outputNames[0]];
  return {shape: found.dims, values: Array.from(found.data)};
}
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve a page, the runtime and the digits sample in 8 bits; yield the address and the file."""
    web = Path(os.environ.get("COMPRESSOR_WEB", "")) / "node_modules/onnxruntime-web/dist"
    if "COMPRESSOR_WEB" not in os.environ or not (web / "ort.wasm.min.js").is_file():
        pytest.skip("COMPRESSOR_WEB names no folder with npm's package onnxruntime-web")
    folder = tmp_path_factory.mktemp("site")
    settings = [f"output={folder / 'out'}", 'exports=[{"format":"onnx","target":"ort-cpu"}]']
    result = compressor.run(DIGITS / "spec.yaml", settings=settings)
    (folder / "model.onnx").write_bytes((result.output / "model.onnx").read_bytes())
    (folder / "web").symlink_to(web)
    (folder / "index.html").write_text(PAGE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/index.html", folder / "model.onnx"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow  # a run, and a browser
def test_a_browser_gives_the_answers_of_the_report(
    site: tuple[str, Path],
    browser: Browser,  # noqa: F811 - the fixture
):
    import onnxruntime as ort

    address, model = site
    with np.load(DIGITS / "test.npz") as stored:
        batch = normalize({name: stored[name] for name in stored.files})
    images, labels = batch["image"].astype(np.float32), batch["label"]
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    found = page.evaluate(
        "([values, shape]) => answers(values, shape)",
        [images.ravel().tolist(), list(images.shape)],
    )
    page.close()
    assert not problems
    theirs = np.asarray(found["values"], np.float32).reshape(found["shape"])
    (ours,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
        None, {"image": images}
    )
    accuracies = [100 * float((a.argmax(1) == labels).mean()) for a in (ours, theirs)]
    assert accuracies[0] > 95
    assert abs(accuracies[1] - accuracies[0]) <= 0.3, accuracies
    assert np.abs(theirs - ours).max() < 0.05 * np.abs(ours).max()
    print(f"accuracy in ONNX Runtime and in the browser: {accuracies}")
