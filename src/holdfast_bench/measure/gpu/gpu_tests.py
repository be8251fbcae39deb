"""The project's tests that need a GPU: in a checkout, or beside collected packages."""

from __future__ import annotations

from pathlib import Path

TESTS_FOLDER = Path(__file__).parents[4] / "tests"


def tests_on_gpu(folder: Path) -> list[Path]:
    """Return the files in a folder whose tests need a GPU; none if there is no such folder."""
    return sorted(folder.rglob("test_on_gpu.py"))
