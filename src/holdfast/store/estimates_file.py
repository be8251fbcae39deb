"""Saved estimates: a small file beside the disk tier, so that a restart starts with them.

Written whole under another name and renamed. A file that cannot be read, or has other content, is
ignored: everything in it can be measured again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from holdfast.regular_file import read_regular, replace_file
from holdfast.store.estimates import Estimates

FILE_BYTES_MAX = 8 << 20
VERSION = 1

_log = logging.getLogger("holdfast.store")


class EstimatesFile:
    """The file of saved estimates; `file` None: there is no disk tier, and nothing is saved."""

    def __init__(self, estimates: Estimates, file: Path | None) -> None:
        self._estimates = estimates
        self._file = file
        self._saved = estimates.changes

    def load(self) -> None:
        """Load what an earlier process saved; other content is left in place and ignored."""
        if self._file is None:
            return
        try:
            data: Any = msgspec.json.decode(read_regular(self._file, FILE_BYTES_MAX))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"not version {VERSION}")
            self._estimates.restore(data)
        except FileNotFoundError:
            return
        except (OSError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            _log.warning(
                "%s: the saved estimates are ignored and will be measured again: %s",
                self._file,
                error,
            )

    def save(self) -> None:
        """Save the estimates if they changed; a failing disk only costs the saved estimates."""
        changes = self._estimates.changes
        if self._file is None or changes == self._saved:
            return
        data = msgspec.json.encode({"version": VERSION, **self._estimates.as_data()})
        try:
            replace_file(self._file, data)
        except OSError as error:
            _log.warning("%s: the estimates were not saved: %s", self._file, error)
        self._saved = changes
