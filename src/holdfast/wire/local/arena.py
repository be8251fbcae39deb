"""A node's arena, mapped into another process as shared memory."""

from __future__ import annotations

import os

from holdfast.buffers import SharedMapping


class ArenaMap:
    """The mapping of one arena; the constructor closes the descriptor.

    A session's places are offsets into the mapping. The arena stays mapped until the last reference
    to this object and its views is gone, also after the connection has ended; keep a reference
    while copying by address. Copied bytes may be used only if the lease is valid after the copy.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            mapping = SharedMapping(fd, nbytes)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.view = mapping.view
        self.address = mapping.address
