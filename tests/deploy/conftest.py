"""The files of deploy/."""

from pathlib import Path

import pytest

import holdfast


@pytest.fixture
def deploy():
    """The folder deploy/ of the clone."""
    folder = Path(holdfast.__file__).parents[2] / "deploy"
    if not folder.is_dir():
        pytest.skip("deploy/ is in a clone only, not in an installed package")
    return folder
