"""What is loaded is left out of garbage collections, and only for as long as was asked."""

import gc

from holdfast.cli.frozen_heap import gc_frozen


def test_collections_pass_by_what_was_there():
    before = gc.get_freeze_count()
    ours = [[] for _ in range(100)]
    with gc_frozen():
        assert gc.get_freeze_count() > before
        assert not any(each is ours for each in gc.get_objects())
    assert any(each is ours for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
