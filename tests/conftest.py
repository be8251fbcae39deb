"""What every test can ask for."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# The shipped contracts: what they assert is told like what a test asserts.
pytest.register_assert_rewrite("holdfast.testing")

# --hypothesis-profile picks one. No deadlines: these tests share two cores with servers.
_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=50, **_SHARED)
# The same examples every time: a change is judged by what it does, and `soak` looks for new ones.
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **_SHARED)
settings.register_profile("soak", max_examples=20_000, print_blob=True, **_SHARED)
settings.load_profile("default")


def pytest_collection_modifyitems(config, items):
    """Leave the soak tests out unless -m asks for some."""
    if not config.option.markexpr:
        skipped = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item not in skipped]


def pytest_collection_finish():
    """Go no more through what the tests have imported: every thread waits long for that."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def standstills():
    """Tell how long something took, less what the machine stood still: `since`."""
    from holdfast.testing.standstill import Standstills  # not before it is rewritten

    with Standstills() as watch:
        yield watch


@pytest.fixture
def soak_s():
    """Seconds that a soak test may take: what `make soak MINUTES=n` asked for."""
    return 60 * float(os.environ.get("HOLDFAST_SOAK_MINUTES", "1"))
