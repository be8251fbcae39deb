"""Check a node's certificate as its peers do: a TLS handshake with itself, in memory.

Peers usually trust the same authority as the node (`tls.ca`). If their `tls.ca` differs, or a
member has a `tls_name`, a refusal here says nothing; so it is a warning.
"""

from __future__ import annotations

import ssl

from holdfast.wire.remote.credentials import (
    TlsFiles,
    client_context,
    server_context,
    tls_trouble,
)

_FLIGHTS_MAX = 10


def refusal_by_hosts(files: TlsFiles, name: str) -> str:
    """Return why hosts do not accept a target's certificate; empty if they do.

    `name`: the host of the target's address; empty if it is not known. Raises ConfigError for files
    that cannot be used.
    """
    server, client = server_context(files), client_context(files)
    server.verify_mode = ssl.CERT_NONE
    client.check_hostname = bool(name)
    return _handshake(server, client, name)


def refusal_by_targets(files: TlsFiles) -> str:
    """Return why targets do not accept a host's certificate; empty if they do."""
    server, client = server_context(files), client_context(files)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    return _handshake(server, client, "")


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Return the reason for which one side ends the handshake; empty if both complete it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_FLIGHTS_MAX):
        waiting = False
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting = True
            except ssl.SSLError as error:
                return tls_trouble(error).partition("not accepted: ")[2] or tls_trouble(error)
        if not waiting:
            break
    return ""
