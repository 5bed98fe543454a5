"""The built site in a real Chromium: on phones and screens, light and dark, links and search."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.chromium import chromium
from tests.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FACTS = """({
  wider: document.documentElement.scrollWidth - innerWidth,
  broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  links: [...document.links].map(a => a.href),
  ids: [...document.querySelectorAll("[id]")].map(e => e.id),
})"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        del args


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", folder]
    subprocess.run(command, check=True)
    return folder


def test_the_first_page_links_to_all(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    for page in [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]:
        name = page.relative_to(docs).with_suffix(".html").as_posix()
        assert f'href="{name}"' in index or name == "index.html"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page(browser: Browser, site: Path, address: str, width: int, scheme: str) -> None:
    names = [p.relative_to(site).as_posix() for p in site.rglob("*.html")]
    names = sorted(name for name in names if not name.startswith("_"))
    assert len(names) > 40
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    page, said, facts = context.new_page(), list[str](), dict[str, Any]()
    page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
    for name in names:
        page.goto(address + name)
        facts[name] = page.evaluate(FACTS)
    context.close()
    assert not said
    assert not {n: f["wider"] for n, f in facts.items() if f["wider"] > 0}
    assert not {n: f["broken"] for n, f in facts.items() if f["broken"]}
    dead = set()
    for name, found in facts.items():
        for link in found["links"]:
            if not link.startswith(address):
                continue
            plain, anchor = urldefrag(link)
            target = unquote(urlsplit(plain).path).lstrip("/") or "index.html"
            known = facts[target]["ids"] if target in facts else [unquote(anchor)]
            if not (site / target).is_file() or (anchor and unquote(anchor) not in known):
                dead.add((name, link))
    assert not dead


def test_the_search_answers(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}search.html?q=gate")
    page.wait_for_selector("#search-results li a")
    assert any("gate.html" in str(a.get_attribute("href")) for a in page.query_selector_all("a"))
    page.goto(f"{address}search.html?q=zzxyqv")
    page.wait_for_selector("text=did not match any documents")
    assert not page.query_selector_all("#search-results li a")
