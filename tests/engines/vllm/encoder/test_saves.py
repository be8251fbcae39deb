"""Saves of encoder outputs: an item that was not saved is saved when it is computed again."""

import pytest

pytest.importorskip("vllm")

from holdfast.engines.vllm.encoder.items import EncoderItem
from holdfast.engines.vllm.encoder.saves import ItemSaves
from holdfast.errors import Outcome

pytestmark = pytest.mark.vllm

ITEM = EncoderItem(1, 2, "float32", bytes(8))


class Session:
    """Named blocks whose saves end as the test says."""

    def __init__(self, ending):
        self._ending = ending

    def put(self, names, memory, after, *_):
        if isinstance(self._ending, Exception):
            raise self._ending
        return [self._ending] * len(names)


@pytest.mark.parametrize(
    ("ending", "is_saved"),
    [(Outcome.OK, True), (Outcome.FULL, False), (ValueError("a mistake"), False)],
)
def test_an_item_counts_as_saved_unless_its_save_failed(ending, is_saved):
    saves = ItemSaves(Session(ending))
    saves.put(b"image", ITEM)
    saves.close()
    assert saves.is_saved(b"image") is is_saved
