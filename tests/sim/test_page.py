"""The report of a simulation in a real browser, narrow and wide."""

import html
import re
import subprocess

import msgspec
import pytest

from holdfast.cli import main

FRAME = """<!doctype html><body>
<iframe id="page" width="{width}" height="900" srcdoc="{page}"></iframe>
<script>
document.getElementById("page").addEventListener("load", event => {{
  const inner = event.target.contentDocument, root = inner.documentElement;
  const boxes = [...inner.querySelectorAll("h1, h2, p, ul, .verdict, .cards, .charts, .wide")];
  document.title = JSON.stringify({{
    scroll: root.scrollWidth, client: root.clientWidth, text: inner.body.innerText,
    broken: boxes.filter(box => box.getBoundingClientRect().right > root.clientWidth + 1).length,
    letters: Math.min(...[...inner.querySelectorAll("svg text")].map(
      each => each.getBoundingClientRect().height)),
  }});
}});
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a shipped trace on a shipped ladder."""
    file = tmp_path_factory.mktemp("sim") / "sim.html"
    options = ["--ladder", "four-tiers", "--model", "Llama-3.1-70B", "--html", str(file)]
    assert main(["sim", "taubench", "--rate", "5", *options]) == 0
    return file.read_text()


@pytest.mark.parametrize("width", [400, 1_400])
def test_the_page_fits_and_begins_with_its_verdict(browser, report, width, tmp_path):
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(report)))
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path}/profile", "--disable-dev-shm-usage"),
            *("--window-size=1500,1000", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    measured = msgspec.json.decode(html.unescape(title[1]))
    assert measured["scroll"] <= measured["client"]
    assert measured["broken"] == 0
    assert measured["letters"] > 9  # the height of a line of text, in pixels
    assert measured["text"].index("This ladder") < measured["text"].index("Tiers")
    for words in ("held at the peak", "in blocks", "Assumptions"):
        assert words in measured["text"]
