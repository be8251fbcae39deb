"""The commands of the page about a first pool, run one after another in one shell."""

import random
import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "first-pool.md"
WITHIN_S = 280


def free_prefix(rng):
    """Return four digits; the ports with these and 1, 2 or 3 behind them are free."""
    while True:
        prefix = str(rng.randrange(1100, 3200))
        try:
            for last in "123":
                with closing(socket.socket()) as probe:
                    probe.bind(("127.0.0.1", int(prefix + last)))
        except OSError:
            continue
        return prefix


@pytest.fixture(scope="module")
def output(tmp_path_factory, unpack_program):
    """Run the page in an empty folder; returns what each of its parts printed."""
    folder = tmp_path_factory.mktemp("fp")
    install, *blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "pip install '/path/to/clone[secure]'" in install
    rng = random.Random()
    script = "set -euo pipefail\nset -m\n" + "\necho '# next part'\n".join(blocks)
    for ports in ("744", "946"):
        prefix = free_prefix(rng)
        script = re.sub(rf"\b{ports}(?=[123]\b|\$number)", prefix, script)
    script = script.replace("9090", free_prefix(rng) + "1")
    commands = (
        f"{Path(sys.executable).parent}:{Path(unpack_program('prometheus', 'prometheus')).parent}"
    )
    done = subprocess.run(
        ["bash", "-c", f"trap 'kill $(jobs -p) || true' EXIT\n{script}"],
        cwd=folder,
        env={"PATH": f"{commands}:/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return done.stdout.split("# next part\n")


@pytest.mark.timeout(WITHIN_S + 20)
def test_the_documented_commands_create_a_pool_that_hosts_share(output):
    _, _, _, look, share, *_ = output
    assert "ok       tls" in look
    assert look.count("; fine in") == 3
    assert share == "{'pool': 7} True\n"
    assert share.strip() in PAGE.read_text()
    [shown] = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in shown.splitlines():
        assert line.partition("tcp://")[0] in look


def test_the_documented_commands_show_the_state_of_the_pool(output):
    watch, scraped = output[5:7]
    assert "of prompt tokens from Holdfast (pool " in watch
    assert "ready" in watch.splitlines()
    assert 'holdfast_member_breaker_open{tier="pool",member="flash-3"} 0' in watch
    assert '"3"' not in scraped  # curl's answers are not printed, the loop ends with the right one


def test_a_lost_target_is_shown_as_unreachable(output):
    lost = output[7]
    assert re.search(r"flash-2 .*; unreachable: ", lost), lost
    assert lost.count("; fine in") == 2
