"""`holdfast bench pool` measures the parts it is asked for, all of them if it is not asked."""

import json

import pytest

from holdfast.cli import main
from holdfast.report import Row
from holdfast_bench.cli.bench import pool

pytest.importorskip("rich")


@pytest.fixture
def measured(monkeypatch, tmp_path, reported):
    """Run `bench pool` with parts that only say their name; return the status and these names."""

    def run(*options, installed=True):
        for module, name in (
            ("pool", "pool_rows"),
            ("pool", "sealed_rows"),
            ("pool", "nixl_rows"),
            ("placement", "placement_rows"),
            ("stripes", "stripe_rows"),
            ("degraded_pool", "trouble_rows"),
            ("silent_pool", "mute_rows"),
            ("peers", "peer_rows"),
        ):
            row = Row(what=name, value=1.0, unit="x")
            monkeypatch.setattr(getattr(pool, module), name, lambda *_, row=row: [row])
        monkeypatch.setattr(pool, "find_spec", lambda _: installed)
        monkeypatch.setattr(pool.model, "make", lambda _: tmp_path)
        status, rows = reported("bench", "pool", "--folder", tmp_path, *options)
        return status, [row["what"] for row in rows]

    return run


def test_all_parts_are_measured_if_none_is_named(measured):
    rows = ["pool_rows", "sealed_rows", "nixl_rows", "placement_rows", "stripe_rows"]
    assert measured() == (0, [*rows, "trouble_rows", "mute_rows", "peer_rows"])


def test_only_the_parts_named_are_measured_in_their_order(measured):
    assert measured("--only", "engine", "tls") == (0, ["sealed_rows", "mute_rows"])
    assert measured("--quick") == (0, ["pool_rows", "sealed_rows"])


def test_without_vllm_the_engine_part_is_a_row_that_says_why(measured, tmp_path):
    rows = ["sealed_rows", "pool.engine"]
    assert measured("--only", "engine", "tls", installed=None) == (0, rows)
    row = json.loads((tmp_path / "report.json").read_text())["rows"][1]
    assert row["value"] is None
    assert row["why"].startswith("vLLM is not installed here")


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "pool", "--only", "everything"])
    assert "everything" in capsys.readouterr().err
