"""The status page in a real browser, narrow and wide."""

import asyncio
import html
import re
import subprocess
from http import HTTPStatus

import msgspec
import pytest

import holdfast
from holdfast.node.http.pages import NodePages
from holdfast.node.http.server import Answer, HttpServer, Routes
from holdfast.node.remote.server import bind
from holdfast.node.remote.service import TargetService

WAIT_S = 120

# The browser prints the page once it is loaded, with the image, which is held back until then.
FRAME = """<!doctype html><body><img src="/wait">
<iframe id="page" src="/" width="{width}" height="900"></iframe>
<script>
const page = document.getElementById("page");
function measured() {{
  const inner = page.contentDocument;
  if (inner?.getElementById("link")?.textContent !== "live")
    return setTimeout(measured, 50);
  const root = inner.documentElement;
  const broken = [...inner.querySelectorAll("section, header")].filter(
    box => box.getBoundingClientRect().right > root.clientWidth + 1).length;
  document.title = JSON.stringify({{scroll: root.scrollWidth, client: root.clientWidth, broken,
    text: inner.body.innerText}});
  fetch("/measured");
}}
measured();
</script>"""


def served(service, width):
    """The node's routes without the header that forbids frames, and a page with a frame of it."""
    routes = NodePages(service.store, service).routes().of_path

    async def page():
        return (await routes["/"]())._replace(headers={})

    is_measured = asyncio.Event()

    async def wait():
        await asyncio.wait_for(is_measured.wait(), WAIT_S)
        return Answer(HTTPStatus.OK, b"")

    async def measured():
        is_measured.set()
        return Answer(HTTPStatus.OK, b"")

    async def frame():
        return Answer(HTTPStatus.OK, FRAME.format(width=width).encode(), "text/html; charset=utf-8")

    return Routes({**routes, "/": page, "/frame": frame, "/wait": wait, "/measured": measured})


@pytest.mark.parametrize("width", [400, 1_400])
def test_the_page_fits_and_shows_the_node(browser, width, tmp_path):
    with holdfast.open(host="16 MiB") as store:
        service = TargetService(store)
        listener = bind("tcp://127.0.0.1:0")
        port = listener.getsockname()[1]
        server = HttpServer(listener, served(service, width)).start()
        try:
            done = subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                    *(f"--user-data-dir={tmp_path}/profile", "--disable-dev-shm-usage"),
                    *("--window-size=1500,1000", f"--timeout={1_000 * WAIT_S}"),
                    f"http://127.0.0.1:{port}/frame",
                ],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
        finally:
            server.close()
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    measured = msgspec.json.decode(html.unescape(title[1]))
    assert measured["scroll"] <= measured["client"]
    assert measured["broken"] == 0
    for words in ("Since start", "host", "No plan yet.", "This node has no pool.", "default"):
        assert words in measured["text"]
