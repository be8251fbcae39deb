"""Holdfast's records in vLLM's log: vLLM shows those of loggers below `vllm` only."""

from __future__ import annotations

import logging

_OURS = logging.getLogger("holdfast")
_VLLM = logging.getLogger("vllm")
_THEIRS = logging.getLogger("vllm.holdfast")


class VllmLog(logging.Handler):
    """Passes records on to vLLM's logger, which gives them a time and a level."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, if vLLM logs records of its level.

        Handlers above vLLM's get the record from its own logger.
        """
        if _THEIRS.isEnabledFor(record.levelno):
            for handler in (*_THEIRS.handlers, *_VLLM.handlers):
                if record.levelno >= handler.level:
                    handler.handle(record)


def log_to_vllm() -> None:
    """Have vLLM's log show the records of this process's Holdfast from now on."""
    if not any(isinstance(handler, VllmLog) for handler in _OURS.handlers):
        _OURS.addHandler(VllmLog())
        _OURS.setLevel(_THEIRS.getEffectiveLevel())
