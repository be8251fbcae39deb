"""Seal a record with a domain's data key, and open it again: AES-256-GCM; pure.

    secret of the domain -> wrapping key -> data key of an epoch (random, kept wrapped)
                                            -> block key = BLAKE2b-256(data key; identity)

Every record has a key of its own, derived from the data key and the record's whole identity with
its random nonce in it; the identity is the associated data as well. So no counter has to survive a
restart or be agreed upon between nodes, and a record under another name, domain, epoch or place in
its chain never opens. AES-GCM is NIST SP 800-38D, by OpenSSL through `cryptography`, which lets
go of the interpreter while it runs. The exact bytes are in docs/reference/format.md.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, NamedTuple

from holdfast.blocks.envelope import (
    HEADER_BYTES,
    KEY_ID_BYTES,
    MARK_BYTES,
    NONCE_BYTES,
    SEAL_AES_GCM,
    SEAL_NONE,
    TAG_BYTES,
    Header,
    read_header,
    resealed,
)
from holdfast.codec.pack import finish, matches
from holdfast.errors import FormatError, Outcome

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DATA_KEY_BYTES = 32
WRAPPED_BYTES = NONCE_BYTES + DATA_KEY_BYTES + TAG_BYTES

_WRAP_CONTEXT = b"holdfast-ring-1"


def missing() -> str:
    """Say why nothing can be sealed or opened in this installation; empty where it can."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return "the cryptography package is missing: pip install 'holdfast[secure]' brings it"
    if not hasattr(AESGCM, "encrypt_into"):
        return "the cryptography package is too old: pip install -U 'holdfast[secure]'"
    return ""


class Sealer(NamedTuple):
    """All that is small of sealing one record, made before the passes over its payload.

    Each of those leaves the processor's caches without the code and the tables that this takes:
    whoever seals several records makes their sealers first.
    """

    header: Header
    plain_identity: bytes
    head: memoryview
    identity: bytes
    nonce: bytes
    cipher: AESGCM

    def seal(self, record: memoryview, into: memoryview) -> Outcome:
        """Write the sealed twin of a packed record into `into`, which has its length.

        CORRUPT if the record does not verify, since a seal would make its damage look right, or is
        not the one that this was made for.
        """
        end = HEADER_BYTES + self.header.payload_bytes
        if bytes(record[MARK_BYTES:HEADER_BYTES]) != self.plain_identity:
            return Outcome.CORRUPT
        if not matches(record, self.header):
            return Outcome.CORRUPT
        payload, coded = record[HEADER_BYTES:end], into[HEADER_BYTES : end + TAG_BYTES]
        self.cipher.encrypt_into(self.nonce, payload, self.identity, coded)
        into[:HEADER_BYTES] = self.head
        into[end + TAG_BYTES :] = bytes(len(into) - end - TAG_BYTES)
        return Outcome.OK


class DataKey:
    """One data key of a domain: seals and opens records of one epoch.

    `secret` (32 bytes) stays the caller's, who may overwrite it with zeros once the key is out of
    use. `key_id` (4 bytes) names it in headers, together with the epoch.
    """

    __slots__ = ("_secret", "epoch", "key_id")

    def __init__(self, secret: bytes | memoryview, epoch: int) -> None:
        if len(secret) != DATA_KEY_BYTES:
            raise FormatError(f"data key has {len(secret)} bytes, not {DATA_KEY_BYTES}")
        self._secret = secret
        self.epoch = epoch
        self.key_id = hashlib.blake2b(
            _u32(epoch), key=secret, digest_size=KEY_ID_BYTES, person=b"holdfast-key-id"
        ).digest()

    def sealer(self, record: memoryview, nonce: bytes) -> Sealer | None:
        """Return what seals this record, or None if its header is damaged.

        `nonce` is 12 random bytes, and never used again.
        """
        head = bytes(record[:HEADER_BYTES])
        try:
            header, _ = read_header(head)
        except FormatError:
            return None
        sealed_head = resealed(head, SEAL_AES_GCM, self.epoch, nonce, self.key_id)
        identity = bytes(sealed_head[MARK_BYTES:])
        cipher = self._cipher(identity)
        return Sealer(header, head[MARK_BYTES:], sealed_head, identity, nonce, cipher)

    def open(self, record: memoryview) -> Outcome:
        """Turn a sealed record into a plain one where it lies: OK, or CORRUPT and of no use.

        MISS if it names another epoch or key. A record that is not sealed is CORRUPT.
        """
        sealed_head = bytes(record[:HEADER_BYTES])
        try:
            header, _ = read_header(sealed_head)
        except FormatError:
            return Outcome.CORRUPT
        end = HEADER_BYTES + header.payload_bytes
        if header.seal != SEAL_AES_GCM or len(record) < end + TAG_BYTES:
            return Outcome.CORRUPT
        if (header.epoch, header.key_id) != (self.epoch, self.key_id):
            return Outcome.MISS
        identity, head = sealed_head[MARK_BYTES:], _plain(sealed_head)
        try:
            self._cipher(identity).decrypt_into(
                header.nonce,
                record[HEADER_BYTES : end + TAG_BYTES],
                identity,
                record[HEADER_BYTES:end],
            )
        except _library().InvalidTag:
            return Outcome.CORRUPT
        record[:HEADER_BYTES] = head
        finish(record, header.payload_bytes)
        return Outcome.OK

    def wrapped(self, domain_key: bytes, domain: bytes, nonce: bytes) -> bytes:
        """Return the key as a key ring keeps it: 60 bytes that only the domain's secret opens."""
        sealed = _wrapping(domain_key).encrypt(
            nonce, bytes(self._secret), _wrap_context(domain, self.epoch)
        )
        return nonce + sealed

    def _cipher(self, identity: bytes) -> AESGCM:
        return _aes(
            hashlib.blake2b(
                identity, key=self._secret, digest_size=DATA_KEY_BYTES, person=b"holdfast-block"
            ).digest()
        )


def derive(domain_key: bytes, epoch: int) -> bytes:
    """Return the secret of an epoch that all who know the domain's secret agree upon."""
    return hashlib.blake2b(
        _u32(epoch), key=domain_key, digest_size=DATA_KEY_BYTES, person=b"holdfast-data"
    ).digest()


def unwrap(wrapped: bytes, domain_key: bytes, domain: bytes, epoch: int) -> bytes:
    """Return the secret of a wrapped data key; raise FormatError if it is damaged or another's."""
    nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
    try:
        if len(wrapped) != WRAPPED_BYTES:
            raise _library().InvalidTag
        return _wrapping(domain_key).decrypt(nonce, sealed, _wrap_context(domain, epoch))
    except _library().InvalidTag as error:
        raise FormatError(
            f"the data key of epoch {epoch} is damaged, or wrapped with another key"
        ) from error


def _plain(head: bytes) -> memoryview:
    """Return the header of the same block, not sealed."""
    return resealed(head, SEAL_NONE, 0, bytes(NONCE_BYTES), bytes(KEY_ID_BYTES))


def _wrapping(domain_key: bytes) -> AESGCM:
    return _aes(
        hashlib.blake2b(
            b"", key=domain_key, digest_size=DATA_KEY_BYTES, person=b"holdfast-wrap"
        ).digest()
    )


def _wrap_context(domain: bytes, epoch: int) -> bytes:
    return _WRAP_CONTEXT + domain + _u32(epoch)


def _aes(secret: bytes) -> AESGCM:
    return _library().AESGCM(secret)


class _Library(NamedTuple):
    AESGCM: type[AESGCM]
    InvalidTag: type[Exception]


@functools.cache
def _library() -> _Library:
    """Load the cipher where it is first used; not by an import statement for each record."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return _Library(AESGCM, InvalidTag)


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
