"""What tests of benches share."""

import pytest

from holdfast_bench.cli import measuring


@pytest.fixture
def engine_is_here(monkeypatch):
    """Let commands believe that vLLM is installed."""
    monkeypatch.setattr(measuring, "find_spec", lambda _: True)
