import itertools

import numpy as np
import pytest

from holdfast.blocks.layout import Layout
from holdfast.devices import host, portable_host, registry
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import DeviceError, LayerPages, Move, Pages
from holdfast.devices.page_format import cpu_format, latent_format, plain_format
from holdfast.devices.portable_host import PortableHostDevice, equal_distances
from holdfast.devices.registry import DeviceKind, DeviceOptions, open_device
from holdfast.errors import BlockError
from holdfast.testing import packings

HEADER, TAG = 128, 16
LAYERS, HEADS, SIZE, TOKENS = 3, 4, 32, 32
BLOCKS = 5


class Arena:
    def __init__(self, nbytes):
        self.bytes = np.full(nbytes, 7, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


class Rank:
    """The pages of one rank: random contents, and which heads of the model they hold."""

    def __init__(self, form, layout, part, count, per_block, gap=0):
        """`gap`: bytes between the last two layers, beside those between all pages."""
        padding = 64
        nbytes = count * (form.page_bytes + padding)
        whole = np.zeros(LAYERS * nbytes + gap, np.uint8)
        starts = [0, nbytes, 2 * nbytes + gap]
        shape = (count, form.page_bytes + padding)
        self.memory = [whole[start : start + nbytes].reshape(shape) for start in starts]
        bases = tuple(layer.ctypes.data for layer in self.memory)
        self.pages = Pages.uniform(
            bases, form.page_bytes + padding, form.page_bytes, count, per_block
        )
        self.portable = PortablePages(form, part)
        self.device = PortableHostDevice(self.pages, self.portable, keep=self.memory)

    def page(self, layer, number):
        return self.memory[layer][number, : self.pages.groups[0].page_bytes]


class Model:
    """The states of some blocks of a whole model, and what an arena with them looks like."""

    def __init__(self, per_block=1):
        self.per_block = per_block
        shape = (BLOCKS, LAYERS, 2, HEADS, per_block * TOKENS, SIZE)
        self.states = np.random.default_rng(1).integers(0, 1 << 16, shape).astype(np.uint16)
        self.layout = Layout.portable(
            layers=LAYERS,
            kv_heads=HEADS,
            head_size=SIZE,
            dtype="bfloat16",
            block_tokens=per_block * TOKENS,
        )

    def payload(self, block):
        return self.states[block].tobytes()

    def page_of(self, packer, block, layer, page, heads):
        keys, values = self.states[block, layer, :, heads, page * TOKENS : (page + 1) * TOKENS]
        return packer(keys, values).view(np.uint8)

    def fill(self, rank, packer, numbers, heads=slice(None)):
        """Write the blocks into pages; `numbers` has the pages of each block."""
        for block, ids in enumerate(numbers):
            for layer in range(LAYERS):
                for at, number in enumerate(ids):
                    rank.page(layer, number)[:] = self.page_of(packer, block, layer, at, heads)


def places_of(layout, kind):
    """Return where payloads are in an arena, and the size of that arena."""
    record = HEADER + layout.raw_bytes + TAG
    order = {
        "in order": range(BLOCKS),
        "backwards": range(BLOCKS)[::-1],
        "scattered": [4, 0, 3, 1, 2],
    }[kind]
    return [place * record + HEADER for place in order], BLOCKS * record


def outside(arena, places, nbytes):
    """Return the bytes of the arena that belong to no payload."""
    mask = np.ones(arena.nbytes, bool)
    for place in places:
        mask[place : place + nbytes] = False
    return arena.bytes[mask]


def numbers_of(per_block, kind="any"):
    """Return the pages of each block: in any order, or one after another in a direction."""
    order = np.random.default_rng(2).permutation(BLOCKS * per_block + 3).tolist()
    if kind != "any":
        order = sorted(order, reverse=kind == "downwards")
    return [order[at * per_block : (at + 1) * per_block] for at in range(BLOCKS)]


ORDERS = [
    ("in order", "upwards"),
    ("in order", "any"),
    ("backwards", "downwards"),
    ("scattered", "upwards"),
    ("scattered", "any"),
]
"""Orders of the blocks in the arena, and of the pages in the engine."""


@pytest.fixture(params=["whole batch", "small parts", "each page"])
def sizes(request, monkeypatch):
    """How a batch is divided, and whether the kernel copies many ranges in one call."""
    if request.param != "whole batch":
        monkeypatch.setattr(portable_host, "SPLIT_BYTES_MIN", 0)
        monkeypatch.setattr(portable_host, "STAGE_BYTES", 40_000)
    if request.param == "each page":
        monkeypatch.setattr(host, "batched_copy_works", lambda: False)


@pytest.mark.parametrize(
    "in_place",
    [(1, 1), (1, 1 << 40), (1 << 40, 1 << 40)],
    ids=["direct", "blocks in place", "all copied"],
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("per_block", "gap"), [(1, 0), (3, 0), (3, 4096)])
def test_blocks_are_saved_portable_and_loaded_into_other_pages(
    sizes, order, per_block, gap, in_place, monkeypatch
):
    monkeypatch.setattr(portable_host, "IN_PLACE_BYTES_MIN", in_place[0])
    monkeypatch.setattr(portable_host, "DIRECT_BYTES_MIN", in_place[1])
    model = Model(per_block)
    form = cpu_format("amx", HEADS, TOKENS, SIZE, 2)
    whole = model.layout.whole()
    first, second = (Rank(form, model.layout, whole, 40, per_block, gap) for _ in range(2))
    places, nbytes = places_of(model.layout, order[0])
    arena, numbers = Arena(nbytes), numbers_of(per_block, order[1])
    model.fill(first, packings.pack_amx, numbers)

    moves = [Move(place, ids) for place, ids in zip(places, numbers, strict=True)]
    assert first.device.gather(arena, moves).result()
    for block, place in enumerate(places):
        payload = bytes(arena.view[place : place + model.layout.raw_bytes])
        assert payload == model.payload(block)
    assert (outside(arena, places, model.layout.raw_bytes) == 7).all()

    assert second.device.scatter(arena, moves).result()
    assert all(map(np.array_equal, first.memory, second.memory))
    for rank in (first, second):
        rank.device.close()


@pytest.mark.parametrize("kind", ["in order", "scattered"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_fill_one_block_together_and_another_number_of_ranks_reads_it(sizes, ranks, kind):
    model = Model(per_block=2)
    places, nbytes = places_of(model.layout, kind)
    arena, numbers = Arena(nbytes), numbers_of(2)
    moves = [Move(place, ids) for place, ids in zip(places, numbers, strict=True)]
    for rank in range(ranks):
        part = model.layout.rank(rank, ranks)
        form = plain_format("nhd", HEADS // ranks, TOKENS, (SIZE, SIZE), 2, fused=True)
        writer = Rank(form, model.layout, part, 20, 2)
        heads = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        model.fill(writer, packings.pack_nhd_fused, numbers, heads)
        assert writer.device.gather(arena, moves).result()
        writer.device.close()
    for block, place in enumerate(places):
        payload = bytes(arena.view[place : place + model.layout.raw_bytes])
        assert payload == model.payload(block)

    for rank in range(6 - ranks):  # four ranks read what two wrote, and the reverse
        readers = 6 - ranks
        part = model.layout.rank(rank, readers)
        form = cpu_format("vec", HEADS // readers, TOKENS, SIZE, 2)
        found, right = (Rank(form, model.layout, part, 20, 2) for _ in range(2))
        assert found.device.scatter(arena, moves).result()
        heads = slice(rank * HEADS // readers, (rank + 1) * HEADS // readers)
        model.fill(right, packings.pack_vec, numbers, heads)
        assert all(map(np.array_equal, found.memory, right.memory))
        found.device.close()
        right.device.close()


def test_of_ranks_that_hold_copies_of_a_head_one_writes_it():
    model = Model()
    places, nbytes = places_of(model.layout, "in order")
    arena, numbers = Arena(nbytes), numbers_of(1)
    moves = [Move(place, ids) for place, ids in zip(places, numbers, strict=True)]
    form = cpu_format("vec", 1, TOKENS, SIZE, 2)
    for rank in range(8):
        writer = Rank(form, model.layout, model.layout.rank(rank, 8), 20, 1)
        if rank % 2 == 0:
            model.fill(writer, packings.pack_vec, numbers, slice(rank // 2, rank // 2 + 1))
        # The pages of the other ranks are zero here, to show that these are not written.
        assert writer.device.gather(arena, moves).result()
        writer.device.close()
    for block, place in enumerate(places):
        payload = bytes(arena.view[place : place + model.layout.raw_bytes])
        assert payload == model.payload(block)


def test_only_the_named_pages_of_a_block_are_written():
    model = Model(per_block=3)
    form = cpu_format("vec", HEADS, TOKENS, SIZE, 2)
    rank = Rank(form, model.layout, model.layout.whole(), 20, 3)
    places, nbytes = places_of(model.layout, "in order")
    arena = Arena(nbytes)
    for block, place in enumerate(places):
        arena.bytes[place : place + model.layout.raw_bytes] = np.frombuffer(
            model.payload(block), np.uint8
        )
    moves = [Move(places[0], [5, 9], first=1), Move(places[1], [2])]
    assert rank.device.scatter(arena, moves).result()
    expected = {5: (0, 1), 9: (0, 2), 2: (1, 0)}
    for number in range(20):
        for layer in range(LAYERS):
            if number in expected:
                block, page = expected[number]
                right = model.page_of(packings.pack_vec, block, layer, page, slice(None))
            else:
                right = 0
            assert (rank.page(layer, number) == right).all()
    rank.device.close()


def test_one_rank_saves_latents_as_they_are_and_every_rank_loads_them():
    form = latent_format(16, 72, 2)
    layout = Layout.portable_latent(layers=LAYERS, latent_size=72, dtype="float16", block_tokens=64)
    ranks = [Rank(form, layout, layout.rank(rank, 2), 20, 4) for rank in range(2)]
    random = np.random.default_rng(3)
    contents = [random.integers(0, 256, layer.shape, np.uint8) for layer in ranks[0].memory]
    arena = Arena(HEADER + layout.raw_bytes + TAG)
    numbers = [3, 9, 1, 0]
    for rank in ranks[::-1]:
        device = open_device("cpu", rank.pages, rank.memory, DeviceOptions(0, rank.portable))
        if rank is ranks[0]:
            for layer, content in zip(rank.memory, contents, strict=True):
                layer[:] = content  # the other rank would save zeros
        assert device.gather(arena, [Move(HEADER, numbers)]).result()
        device.close()
    pages = [ranks[0].page(layer, number) for layer in range(LAYERS) for number in numbers]
    assert bytes(arena.view[HEADER:-TAG]) == b"".join(page.tobytes() for page in pages)
    for rank in ranks:
        for layer in rank.memory:
            layer[:] = 0
        device = open_device("cpu", rank.pages, rank.memory, DeviceOptions(0, rank.portable))
        assert device.scatter(arena, [Move(HEADER, numbers)]).result()
        device.close()
        rank.device.close()
        used = form.page_bytes
        for layer, content in zip(rank.memory, contents, strict=True):
            assert (layer[numbers, :used] == content[numbers, :used]).all()


LISTS = ((0, 2), (1,))
"""Layers of the model by page list: vLLM gives lists of one kind the same memory."""


class ListedRank(Rank):
    """The pages of a rank whose layers are in two page lists; the lists share the first memory."""

    def __init__(self, form, layout, count, per_list, lists=LISTS, part=None):
        shape = (max(map(len, lists)), count, form.page_bytes)
        self.memory = np.zeros(shape, np.uint8)
        bases = [layer.ctypes.data for layer in self.memory]
        groups = tuple(
            LayerPages(tuple(bases[: len(layers)]), form.page_bytes, form.page_bytes)
            for layers in lists
        )
        self.pages = Pages(groups, count, per_list * len(lists), lists=len(lists))
        self.portable = PortablePages(form, part or layout.whole(), lists)
        self.device = PortableHostDevice(self.pages, self.portable, keep=self.memory)
        self.lists, self.per_list = lists, per_list

    def layer_pages(self, layer, ids):
        """Return the pages of a layer that a block has, by the block's page numbers."""
        (listed,) = [at for at, layers in enumerate(self.lists) if layer in layers]
        slot = self.lists[listed].index(layer)
        first = listed * self.per_list
        return [self.memory[slot, number] for number in ids[first : first + self.per_list]]


@pytest.mark.parametrize("in_place", [(1, 1), (1 << 40, 1 << 40)], ids=["direct", "all copied"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("per_list", [1, 2])
def test_layers_in_several_page_lists_fill_one_block_in_the_models_order(
    sizes, order, per_list, in_place, monkeypatch
):
    monkeypatch.setattr(portable_host, "IN_PLACE_BYTES_MIN", in_place[0])
    monkeypatch.setattr(portable_host, "DIRECT_BYTES_MIN", in_place[1])
    model = Model(per_list)
    form = cpu_format("vec", HEADS, TOKENS, SIZE, 2)
    first, second = (ListedRank(form, model.layout, 40, per_list) for _ in range(2))
    places, nbytes = places_of(model.layout, order[0])
    arena, numbers = Arena(nbytes), numbers_of(2 * per_list, order[1])
    for block, ids in enumerate(numbers):
        for layer in range(LAYERS):
            for at, page in enumerate(first.layer_pages(layer, ids)):
                page[:] = model.page_of(packings.pack_vec, block, layer, at, slice(None))

    moves = [Move(place, ids) for place, ids in zip(places, numbers, strict=True)]
    assert first.device.gather(arena, moves).result()
    for block, place in enumerate(places):
        assert bytes(arena.view[place : place + model.layout.raw_bytes]) == model.payload(block)
    assert (outside(arena, places, model.layout.raw_bytes) == 7).all()

    some = [Move(moves[0].payload, moves[0].pages[1:], first=1), *moves[1:]]
    assert second.device.scatter(arena, some).result()
    for layer in LISTS[0]:
        first.layer_pages(layer, numbers[0])[0][:] = 0  # the page that was not to be loaded
    assert (first.memory == second.memory).all()
    assert first.pages.raw_bytes == model.layout.raw_bytes
    for rank in (first, second):
        rank.device.close()


@pytest.mark.parametrize("size", [1, 2])
def test_pipeline_stages_and_ranks_fill_one_block_and_read_their_part_of_it(sizes, size):
    model = Model(per_block=2)
    places, nbytes = places_of(model.layout, "in order")
    arena, numbers = Arena(nbytes), numbers_of(2)
    moves = [Move(place, ids) for place, ids in zip(places, numbers, strict=True)]
    share = HEADS // size
    form = cpu_format("vec", share, TOKENS, SIZE, 2)
    ranks = itertools.product((range(1, LAYERS), range(1)), range(size))
    for stage, rank in ranks:
        part, heads = model.layout.rank(rank, size, stage), slice(rank * share, (rank + 1) * share)
        own, found = (
            ListedRank(form, model.layout, 20, 2, (tuple(stage),), part) for _ in range(2)
        )
        for (block, ids), layer in itertools.product(enumerate(numbers), stage):
            for at, page in enumerate(own.layer_pages(layer, ids)):
                page[:] = model.page_of(packings.pack_vec, block, layer, at, heads)
        assert own.device.gather(arena, moves).result()
        assert found.device.scatter(arena, moves).result()
        assert (found.memory == own.memory).all()
        for each in (own, found):
            each.device.close()
    for block, place in enumerate(places):
        assert bytes(arena.view[place : place + model.layout.raw_bytes]) == model.payload(block)


def test_a_stage_copies_its_latents_to_their_place_in_the_block():
    form = latent_format(16, 72, 2)
    layout = Layout.portable_latent(layers=LAYERS, latent_size=72, dtype="float16", block_tokens=64)
    arena = Arena(layout.raw_bytes)
    for stage in (range(1), range(1, LAYERS)):
        memory = np.full((len(stage), 8, form.page_bytes), stage.stop, np.uint8)
        bases = tuple(layer.ctypes.data for layer in memory)
        pages = Pages.uniform(bases, form.page_bytes, form.page_bytes, 8, 4)
        portable = PortablePages(form, layout.rank(0, 1, stage), (tuple(stage),))
        device = open_device("cpu", pages, [memory], DeviceOptions(0, portable))
        assert device.gather(arena, [Move(0, [3, 1, 0, 2])]).result()
        device.close()
    layers = arena.bytes.reshape(LAYERS, -1)
    assert (layers == [[1], [LAYERS], [LAYERS]]).all()


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        (((0, 1), (2,)), "pages of 1 groups in 1 lists; .* a group for each of the 2 lists"),
        (((0, 1),), r"page lists of the layers \(\(0, 1\),\); the slice has \[0, 1, 2\]"),
        (((0, 1, 1),), r"page lists of the layers \(\(0, 1, 1\),\); the slice has"),
    ],
)
def test_page_lists_that_are_not_those_of_the_layout_are_refused(lists, named):
    model = Model()
    form = cpu_format("vec", HEADS, TOKENS, SIZE, 2)
    pages = Pages.uniform((0, 1, 2), form.page_bytes, form.page_bytes, 8, 1)
    with pytest.raises(BlockError, match=named):
        PortableHostDevice(pages, PortablePages(form, model.layout.whole(), lists))


def test_moves_out_of_bounds_are_refused_before_anything_is_copied():
    model = Model()
    form = cpu_format("vec", 2, TOKENS, SIZE, 2)
    rank = Rank(form, model.layout, model.layout.rank(1, 2), 8, 1)
    arena = Arena(model.layout.raw_bytes + 100)
    # The payload is that of the whole model, of which a rank reads only a part.
    for payload in (-8, 104):
        with pytest.raises(BlockError, match=f"at {payload} requested"):
            rank.device.scatter(arena, [Move(0, [1]), Move(payload, [2])])
    with pytest.raises(BlockError, match="the engine has 8"):
        rank.device.gather(arena, [Move(0, [8])])
    two = Rank(cpu_format("vec", HEADS, 16, SIZE, 2), model.layout, model.layout.whole(), 8, 2)
    with pytest.raises(BlockError, match="1 pages of a block to save, which has 2"):
        two.device.gather(arena, [Move(0, [1])])
    assert not any(layer.any() for layer in rank.memory)
    assert (arena.bytes == 7).all()
    rank.device.close()
    two.device.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": 3}, "has 12288 bytes, the engine's 16384"),
        ({"page_bytes": 12288, "heads": 3}, "states of .6144, 6144. bytes"),
        ({"per_block": 2}, "2 pages of 32 tokens are no block of 32"),
        ({"bases": 2}, "a page list has 3 layers of the layout, and 2 of the engine"),
        ({"groups": 2}, "pages of 2 groups in 1 lists; .* a group for each of the 1 lists"),
        ({"layers": range(1, 3)}, "a page list has 2 layers of the layout, and 3 of the engine"),
    ],
)
def test_pages_that_do_not_fit_the_portable_layout_are_refused(change, named):
    model = Model()
    form = cpu_format("vec", change.get("heads", HEADS), TOKENS, SIZE, 2)
    bases = tuple(range(change.get("bases", LAYERS)))
    nbytes = change.get("page_bytes", 16384)
    groups = (LayerPages(bases, nbytes, nbytes),) * change.get("groups", 1)
    pages = Pages(groups, 8, change.get("per_block", 1))
    part = model.layout.slice(layers=change.get("layers"))
    with pytest.raises(BlockError, match=named):
        PortableHostDevice(pages, PortablePages(form, part))


def test_a_kind_of_device_that_does_not_convert_is_refused_for_portable_blocks(monkeypatch):
    model = Model()
    rank = Rank(cpu_format("vec", HEADS, TOKENS, SIZE, 2), model.layout, model.layout.whole(), 8, 1)
    monkeypatch.setattr(registry, "find_kind", lambda _name: DeviceKind(lambda *_: rank.device))
    with pytest.raises(DeviceError, match="'npu' cannot be converted to portable blocks yet"):
        open_device("npu", rank.pages, [], DeviceOptions(portable=rank.portable))
    assert open_device("npu", rank.pages, [], DeviceOptions()) is rank.device
    rank.device.close()


def test_offsets_are_divided_into_runs_of_equal_distance():
    assert equal_distances([]) == []
    assert equal_distances([(7,)]) == [range(1)]
    one = [(position,) for position in (1, 4, 7, 9, 11, 11, 3)]
    assert equal_distances(one) == [range(3), range(3, 5), range(5, 7)]
    assert equal_distances([(9, 0), (6, 1), (3, 2), (0, 2)]) == [range(3), range(3, 4)]
