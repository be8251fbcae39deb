"""The bare target keeps what was put last, and objects that are put again take no more room."""

from contextlib import closing

import pytest

obstore = pytest.importorskip("obstore")

from holdfast.limits import MIB  # noqa: E402
from holdfast_bench.peers.bare_store import KEPT_BYTES, BareStore  # noqa: E402


def test_an_object_stays_while_another_one_is_put_again_and_again(tmp_path):
    with closing(BareStore(tmp_path)) as server:
        server.start()
        store, large = server.store(), bytes(64 * MIB)
        obstore.put(store, "kept", large, use_multipart=False)
        for _ in range(KEPT_BYTES // len(large) + 1):
            obstore.put(store, "again", large, use_multipart=False)
        assert len(obstore.get_range(store, "kept", start=0, end=len(large))) == len(large)
