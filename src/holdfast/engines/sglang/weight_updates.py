"""Updates of a server's weights while it runs, after which saved pages belong to other weights.

SGLang empties its own caches after an update, but tells its storage nothing, so pages of earlier
weights would be found under the same names. Its plugin interface tells when an update begins.
"""

from __future__ import annotations

from typing import Any

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
"""The class of SGLang whose methods change weights."""

UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


class WeightUpdates:
    """Counts the updates of this process since the first storage was constructed."""

    def __init__(self) -> None:
        self.begun = 0

    def count(self, *_: Any, **__: Any) -> None:
        """Count an update; SGLang calls it before the update."""
        self.begun += 1


_updates = WeightUpdates()
_hooked: list[str] = []


def watch() -> WeightUpdates:
    """Count the updates of this process from now on; return the counter."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not _hooked:
        for method in UPDATES:
            HookRegistry.register(f"{UPDATER}.{method}", _updates.count, HookType.BEFORE)
            _hooked.append(method)
        HookRegistry.apply_hooks()
    return _updates
