import os
import threading
import time

import numpy as np
import pytest

from holdfast.devices import host
from holdfast.devices.base import Move, Pages, rows
from holdfast.devices.host import HostDevice, pieces
from holdfast.errors import BlockError

HEADER = 128


class Arena:
    def __init__(self, nbytes):
        self._bytes = np.zeros(nbytes, np.uint8)
        self.address = self._bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self._bytes)


class Engine:
    """Layers of pages in one allocation, as an engine has them, with padding between pages."""

    def __init__(self, layers, count, page_bytes, pages_per_block, padding=0):
        self.bytes = np.zeros((layers, count, page_bytes + padding), np.uint8)
        bases = tuple(self.bytes[layer].ctypes.data for layer in range(layers))
        self.page_bytes = page_bytes
        self.pages = Pages.uniform(bases, page_bytes + padding, page_bytes, count, pages_per_block)

    def page(self, layer, page):
        return self.bytes[layer, page, : self.page_bytes]

    def block(self, ids):
        return b"".join(
            self.page(layer, i).tobytes() for layer in range(len(self.bytes)) for i in ids
        )


def content(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


SHAPES = [
    pytest.param(1, 4, 64, 1, 0, id="one layer"),
    pytest.param(3, 40, 512, 1, 0, id="a page a block"),
    pytest.param(3, 40, 512, 4, 0, id="four pages a block"),
    pytest.param(2, 16, 192, 2, 64, id="padded pages"),
    pytest.param(5, 600, 256, 1, 0, id="more ranges than one call takes"),
    pytest.param(4, 64, 32768, 2, 0, id="large enough for two threads"),
]


@pytest.fixture(params=["batched", "each"])
def copies(request, monkeypatch):
    if request.param == "each":
        monkeypatch.setattr(host, "batched_copy_works", lambda: False)
    return request.param


@pytest.mark.parametrize(("layers", "count", "page_bytes", "per_block", "padding"), SHAPES)
def test_blocks_gathered_and_scattered_to_other_pages_are_unchanged(
    copies, layers, count, page_bytes, per_block, padding
):
    engine = Engine(layers, count, page_bytes, per_block, padding)
    engine.bytes[:] = content(1, engine.bytes.size).reshape(engine.bytes.shape)
    before = engine.bytes.copy()
    blocks = count // per_block // 2
    record = HEADER + engine.pages.raw_bytes + 16
    arena = Arena(blocks * record)
    order = np.random.default_rng(2).permutation(count).tolist()
    source = [order[i * per_block : (i + 1) * per_block] for i in range(blocks)]
    target = [order[count - (i + 1) * per_block : count - i * per_block] for i in range(blocks)]
    places = [i * record + HEADER for i in np.random.default_rng(3).permutation(blocks).tolist()]
    device = HostDevice(engine.pages, keep=engine)

    assert device.gather(
        arena, [Move(p, ids) for p, ids in zip(places, source, strict=True)]
    ).result()
    for place, ids in zip(places, source, strict=True):
        assert bytes(arena.view[place : place + engine.pages.raw_bytes]) == engine.block(ids)
    assert device.scatter(
        arena, [Move(p, ids) for p, ids in zip(places, target, strict=True)]
    ).result()
    device.close()

    for ids, new in zip(source, target, strict=True):
        for layer in range(layers):
            for a, b in zip(ids, new, strict=True):
                assert (engine.page(layer, b) == before[layer, a, :page_bytes]).all()
    written = {page for ids in target for page in ids}
    rest = [page for page in range(count) if page not in written]
    assert (engine.bytes[:, rest] == before[:, rest]).all()
    assert (engine.bytes[:, :, page_bytes:] == before[:, :, page_bytes:]).all()


def test_the_helper_of_a_thread_bound_to_one_core_runs_on_all_cores():
    """vLLM's worker binds each of its threads to a core; a copy by two of one core is no faster."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    found = []

    def bound():
        os.sched_setaffinity(0, {min(cores)})
        device = HostDevice(Engine(1, 4, 64, 1).pages)
        found.append(device._helper.submit(os.sched_getaffinity, 0).result())
        device.close()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [cores]


@pytest.mark.parametrize("refused", ["sched_getaffinity", "sched_setaffinity"])
def test_pages_are_copied_if_thread_affinity_cannot_be_set(monkeypatch, refused):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, refused, refuse)
    engine = Engine(4, 64, 32768, 2)
    arena = Arena(8 * engine.pages.raw_bytes)
    arena.view[:] = content(7, arena.nbytes)
    device = HostDevice(engine.pages)
    moves = [Move(i * engine.pages.raw_bytes, [2 * i, 2 * i + 1]) for i in range(8)]
    assert device.scatter(arena, moves).result()
    device.close()
    assert engine.block([0, 1]) == bytes(arena.view[: engine.pages.raw_bytes])


def test_a_load_can_fill_only_some_pages_of_a_block(copies):
    engine = Engine(3, 20, 128, 4)
    arena = Arena(HEADER + engine.pages.raw_bytes)
    arena.view[:] = content(5, arena.nbytes)
    payload = np.frombuffer(arena.view, np.uint8)[HEADER:].reshape(3, 4, 128)
    device = HostDevice(engine.pages)

    assert device.scatter(arena, [Move(HEADER, [7, 3], first=1)]).result()
    device.close()

    for layer in range(3):
        assert (engine.page(layer, 7) == payload[layer, 1]).all()
        assert (engine.page(layer, 3) == payload[layer, 2]).all()
    others = [page for page in range(20) if page not in {3, 7}]
    assert not engine.bytes[:, others].any()


def test_layers_with_pages_of_other_sizes_follow_each_other_in_a_payload(copies):
    wide, narrow = Engine(2, 20, 512, 2), Engine(3, 20, 96, 2, padding=32)
    pages = Pages(wide.pages.groups + narrow.pages.groups, 20, 2)
    assert pages.raw_bytes == wide.pages.raw_bytes + narrow.pages.raw_bytes
    for engine in (wide, narrow):
        engine.bytes[:] = content(6, engine.bytes.size).reshape(engine.bytes.shape)
    ids = [[3, 7], [0, 19], [8, 4]]
    arena = Arena(3 * (HEADER + pages.raw_bytes))
    places = [at * (HEADER + pages.raw_bytes) + HEADER for at in (2, 0, 1)]
    moves = [Move(place, block) for place, block in zip(places, ids, strict=True)]
    device = HostDevice(pages, keep=(wide, narrow))
    assert device.gather(arena, moves).result()
    for place, block in zip(places, ids, strict=True):
        payload = bytes(arena.view[place : place + pages.raw_bytes])
        assert payload == wide.block(block) + narrow.block(block)
    before = [wide.block([3, 7, 8]), narrow.block([3, 7, 8])]
    wide.bytes[:], narrow.bytes[:] = 0, 0
    assert device.scatter(arena, [moves[0], Move(places[2], [8])]).result()
    device.close()
    assert [wide.block([3, 7, 8]), narrow.block([3, 7, 8])] == before
    others = [page for page in range(20) if page not in {3, 7, 8}]
    assert not wide.bytes[:, others].any()
    assert not narrow.bytes[:, others].any()


def test_an_empty_plan_moves_nothing_and_succeeds(copies):
    engine = Engine(2, 4, 64, 1)
    device = HostDevice(engine.pages)
    assert device.scatter(Arena(1024), []).result()
    device.close()
    assert not engine.bytes.any()


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (Move(HEADER, [4]), "the engine has 4"),
        (Move(HEADER, [-1]), r"pages \[-1\]"),
        (Move(2000, [0]), "the arena has 1024 bytes"),
        (Move(-8, [0]), "at -8 requested"),
        (Move(HEADER, [0, 1]), "which has 1"),
        (Move(HEADER, []), "which has 1"),
    ],
)
def test_a_move_outside_the_pages_or_arena_is_refused_before_any_copy(move, named):
    engine = Engine(2, 4, 64, 1)
    arena = Arena(1024)
    arena.view[:] = content(1, 1024)
    device = HostDevice(engine.pages)
    with pytest.raises(BlockError, match=named):
        device.scatter(arena, [Move(HEADER, [1]), move])
    device.close()
    assert not engine.bytes.any()


def test_a_copy_that_falls_short_is_reported_as_failed(caplog):
    engine = Engine(1, 4, 64, 1)
    arena = Arena(1024)
    unmapped = Pages.uniform((8,), 64, 64, 4, 1)
    device = HostDevice(unmapped, keep=engine)
    assert not device.scatter(arena, [Move(HEADER, [0])]).result()
    device.close()
    assert "Bad address" in caplog.text


def test_a_copy_that_fails_on_the_callers_thread_waits_for_the_helper_thread(monkeypatch):
    engine = Engine(4, 64, 32768, 2)
    arena = Arena(8 * engine.pages.raw_bytes)
    device, ended = HostDevice(engine.pages), []

    def copy(_plan):
        if threading.current_thread() is threading.main_thread():
            raise MemoryError
        time.sleep(0.2)
        ended.append(True)
        return True

    monkeypatch.setattr(host, "_copy_batched", copy)
    moves = [Move(i * engine.pages.raw_bytes, [2 * i, 2 * i + 1]) for i in range(8)]
    for move in (device.scatter, device.gather):
        with pytest.raises(MemoryError):
            move(arena, moves)
        assert ended.pop()
    device.close()


def test_a_warning_names_the_remedy_if_process_vm_readv_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(host, "batched_copy_works", lambda: False)
    HostDevice(Engine(1, 1, 64, 1).pages).close()
    assert "process_vm_readv is refused" in caplog.text


def ranges(flat):
    return list(zip(flat[::2], flat[1::2], strict=True))


def test_neighbouring_rows_are_joined():
    plan = zip([100, 110, 120, 200, 50, 60], [0, 10, 50, 60, 70, 90], [10] * 6, strict=True)
    (piece,) = pieces(plan)
    assert ranges(piece.to) == [(100, 30), (200, 10), (50, 20)]
    assert ranges(piece.source) == [(0, 20), (50, 30), (90, 10)]
    assert piece.nbytes == 60
    assert pieces([]) == []


def test_no_call_takes_more_ranges_or_bytes_than_the_kernel_allows(monkeypatch):
    monkeypatch.setattr(host, "BYTES_MAX", 5000)
    scattered = [i * 10 for i in range(4000)]
    run = [7 + i * 3 for i in range(4000)]
    for to, source in ((scattered, run), (run, scattered), (run, run)):
        plan = pieces(zip(to, source, [3] * 4000, strict=True))
        assert sum(piece.nbytes for piece in plan) == 12_000
        for piece in plan:
            assert len(piece.to) // 2 <= 1024
            assert len(piece.source) // 2 <= 1024
            assert sum(piece.to[1::2]) == sum(piece.source[1::2]) == piece.nbytes <= 5000


def test_a_payload_is_one_range_of_the_arena():
    engine = Engine(3, 8, 64, 2)
    arena = Arena(4096)
    moves = [Move(128, [1, 5]), Move(2048, [2, 3])]
    plan = ((far, near, size) for near, far, size in rows(engine.pages, arena, moves))
    (piece,) = pieces(plan)
    assert ranges(piece.to) == [(arena.address + 128, 384), (arena.address + 2048, 384)]
    assert len(ranges(piece.source)) == 3 * 2 + 3
