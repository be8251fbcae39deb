"""Credentials of nodes and targets: certificates and tokens, from files.

Files are read for each new connection, so that renewed files are used without a restart.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.errors import ConfigError
from holdfast.regular_file import check_regular, file_stamp, open_regular
from holdfast.wire.remote.token import TOKEN_CHARS_MAX, VERBS, Token, Verb, read

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)

_OTHERS = 0o007
_GROUP_AND_OTHERS = 0o077
_CERTIFICATE_ALERTS = (
    "BAD_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REQUIRED",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_UNKNOWN",
    "UNKNOWN_CA",
    "UNSUPPORTED_CERTIFICATE",
)
"""Alerts of TLS about a certificate (RFC 8446, 6.2), as OpenSSL names them."""

_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
"""OpenSSL's verification errors (x509_vfy.h) for a certificate that no known authority signed."""


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files for TLS: this node's certificate and key, and the CA of its peers."""

    cert: str
    key: str
    ca: str


class Credentials(NamedTuple):
    """A node's credentials for a target; none are needed for a target on a loopback address.

    Without TLS and a token, a target on a loopback address must be a process of this process's user
    or of root, unless `any_user`: another user of the machine could have taken its port first.
    """

    tls: TlsFiles | None = None
    token_file: str = ""
    any_user: bool = False

    @property
    def proves_nothing(self) -> bool:
        """Whether these credentials authenticate neither side."""
        return self.tls is None and not self.token_file

    def token(self) -> Token | None:
        """Read the token, if one is configured; raise ConfigError that names the file."""
        if not self.token_file:
            return None
        line = read_secret(self.token_file, "token file", TOKEN_CHARS_MAX + 1)
        try:
            return read(line.decode())
        except (UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(
                f"token file {self.token_file!r} holds no token but {len(line)} other bytes; "
                "make one with `holdfast token`"
            ) from error

    def may(self) -> Sequence[Verb]:
        """Return the token's permissions; all without a token, or if it cannot be read."""
        try:
            token = self.token()
        except ConfigError:  # a call that needs it reports the error
            token = None
        return VERBS if token is None else token.claims.may


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a node's connections: TLS 1.3, both certified, name checked."""
    import ssl

    return _restricted(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a target: TLS 1.3, and no peer without a certificate."""
    import ssl

    return _restricted(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def tls_trouble(error: ssl.SSLError) -> str:
    """Return the reason of a failed handshake in OpenSSL's words, and whose certificate it is."""
    import ssl

    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message
        unknown = " (unknown authority)" * (error.verify_code in _UNKNOWN_AUTHORITY)
        return f"the other side's certificate is not accepted: {words}{unknown}"
    if (alert := reason.partition("ALERT_")[2]) in _CERTIFICATE_ALERTS:
        words = alert.lower().replace("_", " ")
        return f"the other side does not accept this side's certificate: {words}"
    return reason


class ServerTls:
    """The TLS context of a target, read again when a file was replaced. Thread-safe.

    Raises ConfigError if the files cannot be used at the start. Later the last usable ones stay.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._context = server_context(files)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        with self._lock:
            if (seen := self._stamps()) != self._seen:
                self._seen = seen
                try:
                    self._context = server_context(self._files)
                except ConfigError as error:
                    _log.warning("tls: the files that were read before stay in use: %s", error)
                else:
                    _log.info("tls: certificates were replaced and are in use")
            return self._context

    def _stamps(self) -> list[tuple[int, ...]]:
        return [file_stamp(file) for file in (self._files.cert, self._files.key, self._files.ca)]


def read_secret(file: str, what: str, nbytes_max: int) -> bytes:
    """Return the bytes of a regular file that only its owner may read; raise ConfigError."""
    try:
        with os.fdopen(open_regular(Path(file)), "rb") as opened:
            exposed = os.fstat(opened.fileno()).st_mode & _GROUP_AND_OTHERS
            data = opened.read(nbytes_max + 1)
    except OSError as error:
        raise ConfigError(
            f"{what} {file!r} cannot be read: {error.strerror}; name a file that is there and "
            "belongs to the user who runs this"
        ) from error
    if exposed:
        raise ConfigError(f"{what} {file!r} is open to other users; chmod 600 it")
    if len(data) > nbytes_max:
        raise ConfigError(f"{what} {file!r} has more than {nbytes_max} bytes; name another file")
    return data


def _restricted(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    """Return a context that demands TLS 1.3 and certificates, with those of `files`."""
    import ssl

    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        check_regular(Path(files.cert))
        check_regular(Path(files.key))
        if Path(files.key).stat().st_mode & _OTHERS:
            raise ConfigError(f"tls.key: {files.key!r} is open to all users; chmod 600 it")
        context.load_cert_chain(files.cert, files.key, _no_password)
    except OSError as error:
        raise ConfigError(
            f"tls.cert, tls.key: {files.cert!r} and {files.key!r} are no certificate and its key "
            f"in PEM: {error.strerror or error}; name a pair that the user who runs this can read"
        ) from error
    try:
        check_regular(Path(files.ca))
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise ConfigError(
            f"tls.ca: {files.ca!r} holds no certificates in PEM: {error.strerror or error}; name "
            "the CA file of the other side's certificate"
        ) from error
    return context


def _no_password() -> bytes:
    raise ConfigError("tls.key: the key has a password; name a key without one, mode 600")
