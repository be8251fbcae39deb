"""The closed formulas of `holdfast size` against `holdfast sim`, the code that serves."""

import json

import pytest

from holdfast.cli import main

LADDER = """\
engine: {gpu: H200x8, step_s: 0}
tiers:
  - {kind: host, medium: ddr5, units: 16}
  - {kind: disk, medium: nvme-qlc, units: 10, capacity: 30.7 TB}
"""
MODEL = ["--model", "llama-3.1-70b"]


def rows(arguments, file):
    assert main([*arguments, "--json", str(file)]) == 0
    return {row["what"]: row for row in json.loads(file.read_text())["rows"]}


def test_size_and_sim_give_equal_hits_and_compute(tmp_path, capsys):
    """Routed to whoever holds most, three machines hit and compute what one large store would.

    First tokens are not compared: the simulator has queues, the formulas leave them out.
    """
    (tmp_path / "ladder.yaml").write_text(LADDER)
    many = ["--workers", "3", "--router", "longest_prefix"]
    ladder = ["--ladder", str(tmp_path / "ladder.yaml")]
    simulated = rows(["sim", "conversation", *ladder, *MODEL, *many], tmp_path / "sim.json")
    sized = rows(["size", "--trace", "conversation", *MODEL], tmp_path / "size.json")
    assert simulated["sim.hit.tokens"]["value"] == pytest.approx(
        sized["size.hit"]["value"], abs=0.01
    )
    engine_s = sized["size.engines"]["value"] * 3537 * 8
    assert simulated["sim.gpu.prefill"]["value"] == pytest.approx(engine_s, rel=0.03)
    saved = sized["size.engines"]["without_memory"] / sized["size.engines"]["value"]
    both = simulated["sim.gpu.prefill"]["value"] + simulated["sim.gpu.saved"]["value"]
    assert both / simulated["sim.gpu.prefill"]["value"] == pytest.approx(saved, rel=0.03)
    capsys.readouterr()
