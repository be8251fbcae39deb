"""A TCP connection by a deadline, names and all."""

from __future__ import annotations

import queue
import socket
import threading

from holdfast.wire.address import HostPort
from holdfast.wire.stream import Deadline


def dial(endpoint: HostPort, deadline: Deadline) -> socket.socket:
    """Connect to the first address of an endpoint that answers, each in its share of the time.

    Raises OSError where none does, TimeoutError at the deadline.
    """
    found = _found(endpoint, deadline)
    failed: OSError = ConnectionRefusedError(f"{endpoint.host!r} has no address")
    for number, address in enumerate(found):
        try:
            return socket.create_connection(address, deadline.seconds() / (len(found) - number))
        except OSError as error:
            failed = error
    raise failed


def _found(endpoint: HostPort, deadline: Deadline) -> list[HostPort]:
    """Look a name up, in a thread of its own: a name server may take longer than we have."""
    if endpoint.is_numeric:
        return [endpoint]
    answer: queue.SimpleQueue[list[HostPort] | OSError] = queue.SimpleQueue()

    def look() -> None:
        try:
            rows = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
            answer.put([HostPort(str(place[0]), endpoint.port) for *_, place in rows])
        except OSError as error:
            answer.put(error)
        except UnicodeError as error:
            answer.put(OSError(f"{endpoint.host!r} is no name: {error}"))

    threading.Thread(target=look, name="holdfast-look-up", daemon=True).start()
    try:
        found = answer.get(timeout=deadline.seconds())
    except queue.Empty as error:
        raise TimeoutError(f"{endpoint.host!r} was not found in time") from error
    if isinstance(found, OSError):
        raise found
    return found
