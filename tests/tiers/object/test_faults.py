"""Object stores that lie, fail or die: a miss or a clear error, and nothing wrong."""

import re
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import obstore
import pytest
from obstore.exceptions import BaseError

from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.tiers.base import HeldAnswer
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions, examine_object, open_object
from holdfast_bench.peers.seaweed_server import SeaweedServer, create_bucket, delete_bucket

FAILED = {Outcome.GONE, Outcome.LATE}
PATIENT = {"deadline_s": 60.0, "write_s": 60.0, "ask_s": 60.0}
"""Limits that a busy machine keeps."""

LISTING = b"""<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>
<Name>b</Name><Prefix></Prefix><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys>
<IsTruncated>false</IsTruncated></ListBucketResult>"""


class HostileServer(ThreadingHTTPServer):
    """The objects of a hostile store, and how it behaves."""

    def __init__(self, behaviour):
        super().__init__(("127.0.0.1", 0), HostileStore)
        self.objects: dict[str, bytes] = {}
        self.behaviour = behaviour


class HostileStore(BaseHTTPRequestHandler):
    """An S3 that keeps objects and misbehaves as the server's `behaviour` says."""

    server: HostileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.answers_failure() or self.refuses_signed_url():
            return
        self.server.objects[self.path] = body
        self.answer(200, b"", {"ETag": '"1"'})

    def do_DELETE(self):
        if self.server.behaviour == "no deletions":
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        self.server.objects.pop(self.path, None)
        self.answer(204, b"")

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.server.behaviour == "no deletions":
            keys = re.findall("<Key>(.*?)</Key>", asked)
            refused = [
                f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                for key in keys
            ]
            self.answer(200, f"<DeleteResult>{''.join(refused)}</DeleteResult>".encode())
            return
        self.answer(200, b"<DeleteResult></DeleteResult>")

    def do_GET(self):
        if self.answers_failure():
            return
        if self.refuses_signed_url():
            return
        if "list-type" in self.path:
            self.answer(200, LISTING)
            return
        data = self.server.objects.get(self.path)
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.server.behaviour == "ignores ranges" or "Range" not in self.headers:
            self.answer(200, data, {"ETag": '"1"'})
        else:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1]
            if self.server.behaviour == "other range":
                part = bytes(len(part))
            said = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self.answer(206, part, {"ETag": '"1"', "Content-Range": said})

    def refuses_signed_url(self):
        """Remove the signature from the path, or refuse it."""
        self.path, _, signature = self.path.partition("?X-Amz-")
        is_refused = bool(signature) and self.server.behaviour == "no signed URLs"
        if is_refused:
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        return is_refused

    def answers_failure(self):
        behaviour = self.server.behaviour
        if behaviour.startswith("only key "):
            key = behaviour.removeprefix("only key ")
            if f"Credential={key}/" not in unquote(f"{self.path} {self.headers['Authorization']}"):
                self.answer(403, b"<Error><Code>ExpiredToken</Code></Error>")
                return True
        if behaviour == "other clock":
            self.answer(403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
            return True
        if behaviour.isdigit():
            self.answer(int(behaviour), b"<Error><Code>SlowDown</Code></Error>")
        return behaviour.isdigit()

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Fri, 27 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hostile(tmp_path):
    """Return a function that starts a hostile store and returns its options and server."""
    servers = []

    def start(behaviour):
        server = HostileServer(behaviour)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        keys = tmp_path / "keys"
        keys.write_text("access_key_id = a\nsecret_access_key = b\n")
        port = server.server_address[1]
        options = ObjectOptions(
            url="s3://b/p",
            endpoint=f"http://127.0.0.1:{port}",
            credentials_file=str(keys),
            deadline_s=60.0,
            write_s=60.0,
        )
        return options, server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


CONTEXT = TierContext("tiers.1", "object", 512)


def await_that(reached, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.05)


@pytest.mark.parametrize("behaviour", ["ignores ranges", "other range"])
def test_a_store_without_honest_ranges_is_refused_by_name(hostile, behaviour):
    options, server = hostile(behaviour)
    [found, *_] = examine_object(options, CONTEXT)
    assert found.ok is False
    assert "does not serve ranges of objects" in found.why
    blocks = ChainedBlocks(65_000)
    with closing(open_object(options, CONTEXT)) as tier:
        assert set(blocks.save(tier, range(2))) <= FAILED
        await_that(lambda: not tier.reachable())
        assert "does not serve ranges" in tier.member_health()[0].trouble
        assert tier.ask(blocks.namespace, blocks.keys(2), 0) == HeldAnswer(0, Outcome.GONE)
        assert blocks.save(tier, range(2)) == blocks.load(tier, range(2)) == [Outcome.GONE] * 2
    assert not any("/7d/" in path for path in server.objects)


@pytest.mark.parametrize("status", ["403", "409", "503", "500"])
def test_a_storm_of_errors_is_an_outcome_and_ends(hostile, status):
    options, server = hostile("honest")
    blocks = ChainedBlocks(65_000)
    with closing(open_object(options, CONTEXT)) as tier:
        await_that(lambda: blocks.save(tier, range(4)) == [Outcome.OK] * 4)
        server.behaviour = status
        assert set(blocks.load(tier, range(4))) <= FAILED
        assert set(blocks.save(tier, range(4, 6))) <= FAILED
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0
        assert not tier.reachable()
        [found] = examine_object(options, CONTEXT)
        assert found.why.startswith(f"SlowDown, {status} "), "what the store said comes first"
        server.behaviour = "honest"
        await_that(lambda: blocks.save(tier, range(4, 6)) == [Outcome.OK] * 2)
        await_that(lambda: blocks.load(tier, range(6)) == [Outcome.OK] * 6)


def test_credentials_that_expire_while_the_tier_is_open_are_replaced_in_place(hostile, monkeypatch):
    monkeypatch.setattr("holdfast.tiers.object.store.CREDENTIALS_S", 0.1)
    options, server = hostile("only key a")
    blocks = ChainedBlocks(65_000)
    with closing(open_object(options, CONTEXT)) as tier:
        await_that(lambda: blocks.save(tier, range(4)) == [Outcome.OK] * 4)
        server.behaviour = "only key fresh"
        assert set(blocks.load(tier, range(4))) <= FAILED
        assert set(blocks.save(tier, range(4, 6))) <= FAILED
        assert "403" in tier.member_health()[0].trouble
        Path(options.credentials_file).write_text("access_key_id=fresh\nsecret_access_key=c\n")
        await_that(lambda: blocks.save(tier, range(4, 6)) == [Outcome.OK] * 2)
        await_that(lambda: blocks.load(tier, range(6)) == [Outcome.OK] * 6)


def test_a_store_that_is_not_there_is_named_with_its_address(hostile):
    options, server = hostile("honest")
    server.shutdown()
    server.server_close()
    [found] = examine_object(options, CONTEXT)
    assert found.ok is False
    assert found.why.startswith(f"no connection to the store, or it ended; GET {options.endpoint}")


def test_a_clock_that_differs_from_the_stores_is_named(hostile):
    options, _ = hostile("other clock")
    [found] = examine_object(options, CONTEXT)
    assert found.ok is False
    assert found.why.startswith("RequestTimeTooSkewed, 403 ")
    with closing(open_object(options, CONTEXT)) as tier:
        await_that(lambda: "RequestTimeTooSkewed" in tier.member_health()[0].trouble)


def test_credentials_that_permit_no_deletions_are_named_with_what_that_means(hostile):
    options, _ = hostile("no deletions")
    [found] = [each for each in examine_object(options, CONTEXT) if "deletions" in each.what]
    assert (found.ok, found.found) == (False, "the credentials do not permit them")
    assert "permit the credentials to delete objects" in found.why


def test_a_store_without_signed_urls_is_read_with_signed_headers(hostile):
    options, _ = hostile("no signed URLs")
    blocks = ChainedBlocks(65_000)
    with closing(open_object(options, CONTEXT)) as tier:
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        for _ in range(2):
            assert blocks.load(tier, range(4)) == [Outcome.OK] * 4
        before = tier.describe()["medium"]["requests"]["get"]
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4
        assert tier.describe()["medium"]["requests"]["get"] == before + 1, "not asked twice again"


def test_an_absent_object_is_a_miss_and_no_outage(side):
    blocks = ChainedBlocks(65_000)
    with closing(side.open(**PATIENT)) as tier:
        blocks.save(tier, range(4))
        for name in side.names("7d/"):
            obstore.delete(side.store(), f"{side.prefix}/{name}")
        assert blocks.load(tier, range(4)) == [Outcome.MISS] * 4
        assert tier.reachable()


def test_a_bucket_that_is_emptied_while_it_is_open_promises_nothing_more(side):
    blocks = ChainedBlocks(65_000)
    with closing(side.open(poll_s=1.0, **PATIENT)) as tier:
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        for name in side.names():
            obstore.delete(side.store(), f"{side.prefix}/{name}")
        await_that(lambda: not tier.held(blocks.namespace, blocks.keys(4), 0))
        assert blocks.load(tier, range(4)) == [Outcome.MISS] * 4
        assert tier.reachable()
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        assert blocks.load(tier, range(4)) == [Outcome.OK] * 4


def test_a_bucket_that_is_deleted_while_it_is_open_is_an_outage_until_it_is_there_again(
    seaweed, sides
):
    side, bucket = sides(seaweed), "deleted-while-open"
    create_bucket(seaweed.endpoint, bucket)
    blocks = ChainedBlocks(65_000)
    with closing(side.open(url=f"s3://{bucket}/cache", poll_s=1.0, **PATIENT)) as tier:
        assert blocks.save(tier, range(4)) == [Outcome.OK] * 4
        store = seaweed.store(bucket)
        for path in [each["path"] for chunk in obstore.list(store) for each in chunk]:
            obstore.delete(store, path)
        delete_bucket(seaweed.endpoint, bucket)
        assert set(blocks.load(tier, range(4))) <= {*FAILED, Outcome.MISS}
        assert set(blocks.save(tier, range(4, 6))) <= FAILED
        await_that(lambda: not tier.reachable())
        assert "there is no bucket of s3://deleted" in tier.member_health()[0].trouble
        with pytest.raises(BaseError):
            list(obstore.list(store))
        create_bucket(seaweed.endpoint, bucket)
        await_that(lambda: blocks.save(tier, range(6)) == [Outcome.OK] * 6)
        await_that(lambda: blocks.load(tier, range(6)) == [Outcome.OK] * 6)


@pytest.mark.parametrize("cut", ["truncated", "longer"])
def test_an_object_of_another_length_serves_right_blocks_only(side, cut):
    blocks = ChainedBlocks(65_000)
    with closing(side.open(**PATIENT)) as tier:
        blocks.save(tier, range(8))
        [name] = side.names("7d/")
        whole = bytes(obstore.get(side.store(), f"{side.prefix}/{name}").bytes())
        changed = whole[: len(whole) // 2] if cut == "truncated" else whole + bytes(9_999)
        obstore.put(side.store(), f"{side.prefix}/{name}", changed, use_multipart=False)
        outcomes = blocks.load(tier, range(8))
        assert outcomes.count(Outcome.OK) == (3 if cut == "truncated" else 8)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS}


@pytest.mark.parametrize("restarts", [False, True])
def test_an_earlier_object_under_a_live_name_is_a_miss(side, restarts):
    """A bucket that was restored, or a cache before it, has valid records of other blocks there."""
    earlier, live, store = ChainedBlocks(65_000), ChainedBlocks(65_000), side.store()
    with closing(side.open(**PATIENT)) as tier:
        assert earlier.save(tier, range(4)) == [Outcome.OK] * 4
        [old] = side.names("7d/")
        assert live.save(tier, range(4)) == [Outcome.OK] * 4
        [new] = set(side.names("7d/")) - {old}
        stale = bytes(obstore.get(store, f"{side.prefix}/{old}").bytes())
        assert obstore.head(store, f"{side.prefix}/{new}")["size"] == len(stale)
        obstore.put(store, f"{side.prefix}/{new}", stale, use_multipart=False)
        if not restarts:
            assert live.load(tier, range(4)) == [Outcome.MISS] * 4
    with closing(side.open(**PATIENT)) as tier:
        await_that(lambda: tier.held(live.namespace, live.keys(4), 0) == 4)
        assert live.load(tier, range(4)) == [Outcome.MISS] * 4
        assert tier.held(live.namespace, live.keys(4), 0) == 0
        assert earlier.load(tier, range(4)) == [Outcome.OK] * 4
        assert live.save(tier, range(4)) == [Outcome.OK] * 4
        assert live.load(tier, range(4)) == [Outcome.OK] * 4


@pytest.mark.parametrize("mood", ["mute", "dribble", "cut"])
def test_a_bad_line_is_an_outcome_in_time_and_is_used_again(side, mood):
    blocks = ChainedBlocks(300_000)
    with closing(side.open(deadline_s=1.0)) as tier:
        assert blocks.save(tier, range(8)) == [Outcome.OK] * 8
        side.proxy.mood = mood
        if mood == "cut":
            side.proxy.cut()
        assert set(blocks.load(tier, range(8))) <= {*FAILED, Outcome.MISS}
        side.proxy.mood = "well"
        side.proxy.cut()
        await_that(lambda: blocks.save(tier, range(8)) == [Outcome.OK] * 8)
        await_that(lambda: blocks.load(tier, range(8)) == [Outcome.OK] * 8)


def test_expired_credentials_are_named_and_replaced_ones_work(seaweed, sides):
    side = sides(seaweed)
    right = side.credentials.read_text()
    side.credentials.write_text("access_key_id = expired\nsecret_access_key = hidden\n")
    blocks = ChainedBlocks(65_000)
    with closing(side.open()) as tier:
        assert set(blocks.save(tier, range(2))) <= FAILED
        await_that(lambda: "403" in tier.member_health()[0].trouble)
        assert "hidden" not in str(tier.describe())
    side.credentials.write_text(right)
    with closing(side.open(**PATIENT)) as tier:
        assert blocks.save(tier, range(2)) == [Outcome.OK] * 2


def test_what_a_killed_server_had_acknowledged_is_there_after_its_restart(tmp_path, sides):
    server = SeaweedServer(tmp_path / "seaweed")
    with closing(server):
        server.start()
        side = sides(server, tmp_path)
        blocks, acknowledged = ChainedBlocks(300_000), []
        with closing(side.open(write_connections=2, write_s=10.0)) as tier:
            assert blocks.save(tier, [0]) == [Outcome.OK]
            some = threading.Event()
            killer = threading.Thread(target=lambda: some.wait(60) and server.kill())
            killer.start()
            for number in range(1, 4_000):
                if blocks.save(tier, [number]) != [Outcome.OK]:
                    break
                acknowledged.append(number)
                some.set()
            killer.join()
        assert acknowledged
        server.restart()
        with closing(side.open(**PATIENT)) as tier:
            keys = blocks.keys(acknowledged[-1] + 1)
            assert tier.held(blocks.namespace, keys, 0) >= len(keys)
            for at in range(0, len(keys), 64):
                part = range(at, min(at + 64, len(keys)))
                assert blocks.load(tier, part) == [Outcome.OK] * len(part)
