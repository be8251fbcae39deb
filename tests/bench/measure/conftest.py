from types import SimpleNamespace

import pytest

from holdfast_bench.cli.bench import plan
from holdfast_bench.measure import engine, plan_cuts


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    """What share of the machine others have beside each sample; nothing unless a test says so."""
    given = []
    others = SimpleNamespace(share=lambda: given.pop(0) if given else 0.0)
    for measuring in (plan_cuts, engine, plan):
        monkeypatch.setattr(measuring, "OtherProcesses", lambda: others)
    return given
