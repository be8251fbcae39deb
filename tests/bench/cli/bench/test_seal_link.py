"""A paced link: its figures are those of a pool, and nobody else's network is paced."""

import os
import shutil
import subprocess

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.cli.bench import seal

needs_a_paced_link = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))),
    reason="needs root, and iproute2",
)


@needs_a_paced_link
def test_a_pool_is_measured_behind_a_link(tmp_path):
    rows = seal.link_rows(tmp_path, 1)
    assert [row.what for row in rows] == ["seal.link.write", "seal.link.fetch"]
    assert all(row.value > 0 and row.limit > 0 for row in rows)


@needs_a_paced_link
def test_the_link_is_paced_at_the_rate_that_is_named():
    show = seal.behind_link(["tc", "qdisc", "show", "dev", "lo"])
    told = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert told.startswith("qdisc tbf")
    assert f"rate {seal.GBIT_PER_S}Gbit" in told


def test_a_link_that_can_not_be_paced_is_a_row_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    [row] = seal.link_rows(tmp_path, 1)
    assert (row.what, row.value, row.ok) == ("seal.link", None, None)
    assert row.more == {"why": "a limited link needs root and the programs unshare, ip, tc"}


def test_a_link_that_takes_too_long_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    def run(argv, **options):
        raise subprocess.TimeoutExpired(argv, options["timeout"])

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: program)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(HoldfastError, match="not measured within 600 s; lower --rounds"):
        seal.link_rows(tmp_path, 1)
