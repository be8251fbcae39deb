"""A tier kind in its own package is installed, configured and used by a store."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest

from holdfast.byte_size import Size
from holdfast.cli import main
from holdfast.config import as_data, parse
from holdfast.errors import ConfigError
from holdfast.finding import Finding
from holdfast.node.daemon import log_tiers
from holdfast.probe import free_port
from holdfast.testing.memory import MemoryTier
from holdfast.tiers import kind
from holdfast.tiers.kind import TierContext, TierKind, TierSection, find_kind

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "toy-tier"

PROGRAM = """
import json
import sys
import numpy as np
import holdfast
from holdfast.testing.embedded import FINGERPRINT, blocks_for, tokens_for

COUNT = 40
with holdfast.open(sys.argv[1]) as store:
    session = store.session(FINGERPRINT)
    for seed in range(60):
        session.save(tokens_for(seed, COUNT), blocks_for(seed, COUNT))
    sources = {}
    for seed in range(60):
        found = np.zeros_like(blocks_for(seed, COUNT))
        landed = session.fetch(tokens_for(seed, COUNT), into=found)
        assert landed.blocks == COUNT, (seed, landed)
        assert (found == blocks_for(seed, COUNT)).all()
        for tier, blocks in landed.sources.items():
            sources[tier] = sources.get(tier, 0) + blocks
print(json.dumps(sources))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a process that has the example package installed."""
    folder = tmp_path_factory.mktemp("toy")
    source = shutil.copytree(EXAMPLE, folder / "source")
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    argv += ["--no-build-isolation", "--target", str(folder / "installed"), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(folder / "installed"), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def configured(tmp_path):
    """Write a configuration with one more tier section below the host tier."""

    def write(section):
        file = tmp_path / "node.yaml"
        (tmp_path / "key").write_text("ab" * 32)
        (tmp_path / "key").chmod(0o600)
        file.write_text(
            f"listen: unix://{tmp_path}/node.sock\n"
            f"domains: {{default: {{key_file: {tmp_path}/key}}}}\n"
            f"tiers: [{{kind: host, capacity: 16 MiB}}, {section}]\n"
        )
        return file

    return write


def run(environment, *argv):
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )


def test_the_installed_example_passes_the_contract(environment):
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", EXAMPLE]
    done = run(environment, "-m", "pytest", *options, EXAMPLE / "test_toy_tier.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("section", "tier"),
    [("{kind: toy, capacity: 64 MiB}", "toy"), ("{kind: toy_shared, shelf: a}", "toy_shared")],
)
def test_a_store_serves_from_a_tier_of_an_installed_kind(environment, configured, section, tier):
    done = run(environment, "-c", PROGRAM, configured(section))
    assert done.returncode == 0, done.stderr
    sources = json.loads(done.stdout)
    assert sources[tier] > 0
    assert sum(sources.values()) == 60 * 40


def test_doctor_shows_an_installed_kind(environment, configured):
    file = configured("{kind: toy, capacity: 64 MiB}")
    done = run(environment, "-m", "holdfast", "doctor", "--config", file)
    assert "toy" in done.stdout
    assert "64 MiB of this process" in done.stdout


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{kind: toy, capacity: 1 KiB}", "tiers.1.capacity: 1 KiB is less than 1 MiB; raise it"),
        (
            "{kind: toy, size: 3}",
            "tiers.1: contains unknown field 'size'; remove it; known here: kind, capacity",
        ),
        ("{kind: unheard_of}", "mooncake, toy, toy_shared"),
    ],
)
def test_invalid_options_and_kinds_are_reported_by_name(environment, configured, section, said):
    done = run(environment, "-m", "holdfast", "doctor", "--config", configured(section))
    assert done.returncode == 1
    assert said in done.stdout


@pytest.fixture
def served(environment, configured):
    """Serve an installed tier with metrics; returns the configuration and the page's URL."""
    running = []

    def start(sections):
        port = free_port()
        file = configured(sections)
        file.write_text(f"{file.read_text()}http: {{listen: 'tcp://127.0.0.1:{port}'}}\n")
        argv = [sys.executable, "-m", "holdfast", "serve", "--config", str(file)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        assert process.stdout.readline().startswith("READY")
        return file, f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.kill()
        process.communicate()


EVERY_COMMAND = """
import sys
from holdfast.cli import main

COMMANDS = (
    *(["inspect"], ["inspect", "pool"], ["inspect", "plans"], ["stats"], ["verify"], ["domain"]),
    *(["top", "--views", "1"], ["doctor"], ["inspect", "drop", "--all", "--yes"]),
)
for command in COMMANDS:
    as_json = [] if command[0] == "top" else ["--json", "/dev/null"]
    assert main([*command, "--config", sys.argv[1], *as_json]) == 0, command
"""


def test_every_command_and_page_shows_a_node_with_installed_tiers(environment, served):
    file, url = served("{kind: toy, capacity: 256 MiB}, {kind: toy_shared, shelf: a}")
    done = run(environment, "-c", EVERY_COMMAND, file)
    assert done.returncode == 0, done.stderr
    assert "toy      0 B of 256 MiB used, 0 records, 0 failures" in done.stdout
    for path in ("/", "/metrics", "/status.json", "/readyz"):
        with urllib.request.urlopen(url + path, timeout=60) as reply:
            text = reply.read().decode()
        if path == "/metrics":
            assert f'holdfast_tier_capacity_bytes{{tier="toy"}} {256 << 20}\n' in text
        if path == "/status.json":
            (toy,) = [tier for tier in json.loads(text)["tiers"] if tier["tier"] == "toy"]
            assert (toy["capacity_bytes"], toy["trouble"]) == (256 << 20, "")


class Options(TierSection, frozen=True):
    size: int = 1


@pytest.fixture
def offered(monkeypatch):
    """Register these objects as entry points of installed packages."""

    class Point(metadata.EntryPoint):
        def load(self):
            found = objects[self.value]
            if isinstance(found, Exception):
                raise found
            return found

    objects = {}

    def entry_points(group):
        assert group == kind.ENTRY_POINTS
        return [Point("mine", value, group) for value in objects]

    def offer(**by_value):
        objects.update(by_value)
        find_kind.cache_clear()

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    find_kind.cache_clear()
    yield offer
    find_kind.cache_clear()


def section(**options):
    return {
        "listen": "unix:///tmp/node.sock",
        "tiers": [{"kind": "host", "capacity": "16 MiB"}, {"kind": "mine", **options}],
    }


def test_a_configuration_is_written_as_it_was_read(offered):
    offered(a=TierKind(Options, lambda *_: MemoryTier(1)))
    config = parse(section(size=3))
    assert config.tier_names == ["host", "mine"]
    assert as_data(config)["tiers"][1] == {"kind": "mine", "size": 3}
    assert parse(as_data(config)) == config
    assert not config.shares


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Finding("tiers.1", Size(3), ok=True), "ok       tiers.1          3 B"),
        (OSError("no medium"), "PROBLEM  tiers.1          mine cannot be examined (OSError: no"),
    ],
)
def test_doctor_shows_what_the_examination_of_a_kind_yields_or_raises(
    offered, tmp_path, capsys, found, said
):
    def examine(options, context):
        if isinstance(found, Exception):
            raise found
        yield found

    offered(a=TierKind(Options, lambda *_: MemoryTier(1), examine=examine))
    file = tmp_path / "node.yaml"
    file.write_text(json.dumps(section(size=1)))
    main(["doctor", "--config", str(file)])
    assert said in capsys.readouterr().out
    main(["doctor", "--config", str(file), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["checks"]


def test_a_node_logs_no_option_of_an_installed_kind(offered, caplog):
    offered(a=TierKind(Options, lambda *_: MemoryTier(1)))
    with caplog.at_level("INFO", "holdfast.node.daemon"):
        log_tiers(parse(section(size=31_415)))
    assert caplog.messages == [
        "tier host: capacity 16 MiB", "tier mine: of the installed kind mine",
    ]  # fmt: skip


def test_a_shared_kind_needs_the_key_that_nodes_share(offered):
    offered(a=TierKind(Options, lambda *_: MemoryTier(1), shared=True))
    with pytest.raises(ConfigError, match=r"tiers\.1: .*domains\.default\.key_file"):
        parse(section())


def test_two_packages_with_one_kind_are_refused(offered):
    offered(a=TierKind(Options, lambda *_: MemoryTier(1)), b=None)
    with pytest.raises(ConfigError, match=r"'mine': offered by a, b; uninstall all but one"):
        parse(section())


@pytest.mark.parametrize(
    ("found", "said"),
    [(ImportError("no libtoy"), "cannot be loaded: ImportError"), (dict, "is of type type, not")],
)
def test_an_unusable_kind_is_refused_by_name(offered, found, said):
    offered(a=found)
    with pytest.raises(ConfigError, match=said):
        parse(section())


def test_a_context_says_where_a_tier_is_configured():
    assert TierContext("tiers.1", "mine", 512).at == "tiers.1"
