"""LMCache, if it is installed beside the project: `make lmcache` does that."""

import sys
import warnings

import pytest

from holdfast_bench.peers import lmcache_environment


def pytest_configure():
    """Make LMCache importable, and import it once, here: it warns while it does."""
    if not lmcache_environment.installed():
        return
    sys.path.append(str(lmcache_environment.folder()))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name, value in lmcache_environment.VARIABLES.items():
            patch.setenv(name, value)
        try:
            import lmcache.v1.distributed.l2_adapters.plugin_l2_adapter
            import lmcache.v1.distributed.storage_manager  # noqa: F401
        except ImportError:
            sys.path.remove(str(lmcache_environment.folder()))
