"""Open a TCP connection by a deadline, including the name lookup."""

from __future__ import annotations

import queue
import socket
import threading

from holdfast.wire.address import HostPort
from holdfast.wire.remote.stream import Deadline


def dial(endpoint: HostPort, deadline: Deadline) -> socket.socket:
    """Connect to the first address of an endpoint that answers, each in its share of the time.

    Raises OSError if none does, TimeoutError at the deadline.
    """
    found = [endpoint]
    if not endpoint.is_numeric:
        # Look the name up in a thread, because a name server may exceed the deadline.
        answer: queue.SimpleQueue[list[HostPort] | OSError] = queue.SimpleQueue()

        def resolve() -> None:
            try:
                rows = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
                answer.put([HostPort(str(place[0]), endpoint.port) for *_, place in rows])
            except OSError as error:
                answer.put(error)
            except UnicodeError as error:
                answer.put(OSError(f"{endpoint.host!r} is not a host name: {error}"))

        threading.Thread(target=resolve, name="holdfast-look-up", daemon=True).start()
        try:
            resolved = answer.get(timeout=deadline.seconds())
        except queue.Empty as error:
            raise TimeoutError(f"{endpoint.host!r} was not found in time") from error
        if isinstance(resolved, OSError):
            raise resolved
        found = resolved
    failed: OSError = ConnectionRefusedError(f"{endpoint.host!r} has no address")
    for number, address in enumerate(found):
        try:
            return socket.create_connection(address, deadline.seconds() / (len(found) - number))
        except OSError as error:
            failed = error
    raise failed
