"""A paced link: its figures are those of a pool, and nobody else's network is paced."""

import os
import shutil

import pytest

from holdfast.rig.measure import seal_link


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))),
    reason="needs root, and iproute2",
)
def test_a_pool_is_measured_behind_a_link(tmp_path):
    rows = seal_link.link_rows(tmp_path, 1)
    assert [row.what for row in rows] == ["seal.link.write", "seal.link.fetch"]
    assert all(0 < row.limit < 1.5 * seal_link.GBIT_PER_S / 8 for row in rows)


def test_there_are_no_rows_where_a_link_can_not_be_paced(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert seal_link.link_rows(tmp_path, 1) == []
