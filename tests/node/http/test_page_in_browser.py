"""The status page in a real browser, narrow and wide."""

import asyncio
import html
import re
import subprocess
from http import HTTPStatus

import msgspec
import pytest

import holdfast
from holdfast.node.http.pages import NodePages, PageStatus
from holdfast.node.http.server import Answer, HttpServer, Routes
from holdfast.node.remote.server import bind
from holdfast.node.remote.service import TargetService
from holdfast.status import (
    ActivityStatus,
    CurveStatus,
    DomainStatus,
    DomainTraffic,
    EngineLockStatus,
    MemberStatus,
    PageLockStatus,
    PlanStatus,
    PlanTimes,
    SharedTierStatus,
    TargetStatus,
    TierCurve,
    TierStatus,
)

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
  const right = box => box.getBoundingClientRect().right;
  const hidden = [...inner.querySelectorAll("td, th, p, h1")].filter(
    cell => cell.offsetParent && (cell.scrollWidth > cell.clientWidth + 1
      || right(cell) > right(cell.closest("section, header")))).map(cell => cell.innerText);
  const names = [...inner.querySelectorAll("td")].map(cell => cell.dataset.name);
  const links = [...inner.querySelectorAll("a")].map(anchor => anchor.href);
  document.title = JSON.stringify({{scroll: root.scrollWidth, client: root.clientWidth, broken,
    hidden, names, links, title: inner.title, text: inner.body.innerText}});
  fetch("/measured");
}}
measured();
</script>"""


PAGE = "http://10.0.0.7:9464/"

BUSY = PageStatus(
    version="1.2.3",
    host="host-0123456789.rack-17.example.internal",
    role="node and target",
    addresses=["unix:///run/holdfast/node.sock", "tcp://10.0.0.3:7441"],
    incarnation="0123456789abcdef",
    uptime_s=7_300.0,
    blocks=1_234_567,
    activity=ActivityStatus(
        *(1_000, 200_000, 10_000),
        loaded_tokens={"host": 100_000},
        calls={"lookup": {"ok": 1_200, "miss": 4}},
    ),
    curve=CurveStatus(
        *(1_340, 2_580.0, 160_000_000, 1_048_576, 310_000, 128, 4_200_000.0, 0.61),
        tiers=[
            TierCurve("host", 1 << 38, {"0.5": 0.12, "1": 0.2, "2": 0.31, "10": 0.6}),
            TierCurve(
                "a-tier-with-a-long-name-of-another-package",
                1 << 44,
                dict.fromkeys(("0.5", "1", "2", "10"), 1.0),
            ),
        ],
    ),
    tiers=[
        TierStatus("host", *(1 << 38, 1 << 37, 1_234_567, 1 << 42, 1 << 43, 0)),
        TierStatus("a-tier-with-a-long-name-of-another-package", trouble="no answer " * 30),
    ],
    shared={
        "pool": SharedTierStatus(
            members=[
                MemberStatus(
                    *("flash-17.pool.example.internal", "half_open", True, 1 << 30, 0.0021),
                    trouble="tls: the certificate expired 3 days ago; " * 4,
                    page=PAGE,
                )
            ]
        ),
        "far": SharedTierStatus(trouble="OSError: the shelf is empty"),
    },
    domains=[
        DomainStatus("0123456789abcdef" * 2, used_bytes={"host": 1 << 37, "disk": 1 << 40}),
        DomainStatus(
            "acme", configured=True, unreadable=123_456, locked_bytes=6 << 30, kept_bytes=1 << 30
        ),
    ],
    page_locks=PageLockStatus(
        [
            EngineLockStatus("vllm", "acme", 5 << 30),
            EngineLockStatus("vllm", "acme", 1 << 30, "the device cannot lock more: ENOMEM " * 5),
        ],
        {"returned": 17, "missed": 1},
    ),
    target=TargetStatus(
        requests=5_310,
        refused=3,
        received_bytes=946_176,
        received_blocks=14,
        sent_bytes=2 << 20,
        sent_blocks=28,
        connections=2,
        domains=[DomainTraffic("acme", received_bytes=946_176, sent_bytes=2 << 20)],
    ),
    plans=[
        PlanStatus(
            7,
            engine="vllm 0.12.0 on host-0123456789.rack-17.example.internal, process 123456",
            prompt_tokens=123_456,
            held_blocks=7_000,
            blocks=6_999,
            actual=PlanTimes(first_token_s=0.0523),
            expected=PlanTimes(first_token_s=12.3),
            reason="fetching 6,999 blocks is expected to take 0.05 s, and computing 12.3 s " * 2,
        )
    ],
)


def served(service, width, status=None):
    """The node's routes without the header that forbids frames, and a page with a frame of it.

    `status`: what the page shows instead of the node.
    """
    routes = dict(NodePages(service.store, service).routes().of_path)

    async def events():
        async def stream():
            yield b"data: " + msgspec.json.encode(status) + b"\n\n"
            await asyncio.sleep(WAIT_S)

        return Answer(HTTPStatus.OK, stream(), "text/event-stream")

    if status is not None:
        routes["/events"] = events

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


@pytest.fixture
def measured_page(browser, tmp_path):
    """Show the page of a node in a frame of this width; returns what the browser measures."""

    def measure(width, status=None):
        with holdfast.open(host="16 MiB") as store:
            service = TargetService(store)
            listener = bind("tcp://127.0.0.1:0")
            port = listener.getsockname()[1]
            server = HttpServer(listener, served(service, width, status)).start()
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
        assert (measured["broken"], measured["hidden"]) == (0, [])
        return measured

    return measure


def test_the_page_shows_that_a_node_is_idle(measured_page):
    measured = measured_page(1_400)
    for words in ("Since start", "host", "No plan yet.", "This node has no pool.", "default"):
        assert words in measured["text"]
    assert "Page-locked memory" not in measured["text"]


@pytest.mark.parametrize("width", [400, 1_000, 1_400])
def test_the_page_of_a_busy_target_shows_every_column(measured_page, width):
    measured = measured_page(width, BUSY)
    assert measured["title"] == f"{BUSY.host} - Holdfast node and target 1.2.3"
    assert measured["links"] == [PAGE]
    text = " ".join(measured["text"].split())
    for words in (
        f"Holdfast node and target {BUSY.host} version 1.2.3, unix:///run/holdfast/node.sock, tcp",
        "tcp://10.0.0.3:7441, start 0123456789abcdef",
        "Since start, 2 hours ago: 1,204 lookups, 1,000 prompts, 50 % of their 200,000 tokens",
        "For other nodes: 5,310 requests (3 refused), received 14 blocks (924 KiB), sent 28 blocks",
        "2 connections, 1,234,567 blocks held.",
        *("breaker half_open", "left out", "2.1 ms", "the certificate expired", "52 ms", "12.30 s"),
        *(
            "the shelf is empty",
            "host 128 GiB, disk 1.0 TiB",
            "123,456",
            BUSY.tiers[1].tier,
            "no answer no answer",
            "the device cannot lock more: ENOMEM",
            "Memory asked back: 17 returned, 1 missed.",
        ),
    ):
        assert words in text
    locks = "vllm acme 5.0 GiB 6.0 GiB 1.0 GiB"
    assert locks in text or width == 400  # names stand beside each figure
    curve = "host 256 GiB 12.0 % 20.0 % 31.0 % 60.0 %"
    assert curve in text or width == 400  # names stand beside each figure
    assert "last 1,340 requests with 310,000 distinct blocks (1.2 TiB); unlimited 61.0 %" in text
    for name in (
        "capacity",
        "twice",
        "tier",
        "used",
        "failures",
        "member",
        "under way",
        "trouble",
        "reason",
        "sent",
        "without blocks",
    ):
        assert name in measured["names"]
