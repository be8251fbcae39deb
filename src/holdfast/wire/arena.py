"""A node's arena as another process sees it: shared memory, mapped for as long as it is held."""

from __future__ import annotations

import os

from holdfast.buffers import SharedMapping


class ArenaMap:
    """The mapping of one arena; takes over the descriptor and closes it.

    Offsets into it are the places of a session. It stays mapped until the last reference to this
    object and to its views is gone, also after the connection ended: hold it while copying by
    address. What is copied out counts only if the lease was still valid after the copy.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            mapping = SharedMapping(fd, nbytes)
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.view = mapping.view
        self.address = mapping.address
