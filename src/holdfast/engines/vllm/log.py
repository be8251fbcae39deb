"""Show the records of Holdfast's own loggers in vLLM's log, with its time and level.

vLLM configures the logger `vllm` only. Records of modules that also run outside of an engine have
loggers below `holdfast`, which without a handler print the bare message to stderr.
"""

from __future__ import annotations

import logging

_VLLM = logging.getLogger("vllm.holdfast")


class VllmLogHandler(logging.Handler):
    """Passes records on to vLLM's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on if vLLM's logger takes its level."""
        if _VLLM.isEnabledFor(record.levelno):
            _VLLM.handle(record)


def show_in_vllm_log() -> None:
    """Pass Holdfast's records on to vLLM, unless the process has a handler that shows them."""
    ours = logging.getLogger("holdfast")
    if not ours.hasHandlers():
        ours.addHandler(VllmLogHandler())
