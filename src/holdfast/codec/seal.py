"""Seal a record with a domain's data key, and open it again, with AES-256-GCM; pure.

    secret of the domain -> wrapping key -> data key of an epoch (random, kept wrapped)
                                            -> block key = BLAKE2b-256(data key; identity)

Every record has its own key, derived from the data key and the record's identity, which includes a
random nonce; the identity is also the associated data. So no counter has to survive a restart or be
shared between nodes, and a record does not open under another key, domain, epoch or position in its
chain. AES-GCM is NIST SP 800-38D, by OpenSSL through `cryptography`, which releases the GIL while
it runs. Exact bytes: docs/reference/format.md.
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
    header_of_record,
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
    """Return why this installation cannot seal or open records; empty if it can."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return "the cryptography package is missing: pip install 'holdfast-kv[secure]'"
    if not hasattr(AESGCM, "encrypt_into"):
        return "the cryptography package is too old: pip install -U 'holdfast-kv[secure]'"
    return ""


class Sealer(NamedTuple):
    """The prepared state for sealing one record: header, nonce and cipher.

    Prepare the sealers of all records of a batch before sealing the first: a pass over a payload
    evicts the code and tables that preparation needs from the processor's caches.
    """

    header: Header
    plain_identity: bytes
    head: memoryview
    identity: bytes
    nonce: bytes
    cipher: AESGCM
    epoch: int

    def seal(self, record: memoryview, into: memoryview) -> Outcome:
        """Write the sealed copy of a packed record into `into`, which has the same length.

        Returns CORRUPT if the record does not verify, because a seal would hide its damage, or if
        it is not the record that this sealer was prepared for.
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

    The caller owns `secret` (32 bytes), and may overwrite it with zeros when the key is no longer
    used. `key_id` (4 bytes) names the key in headers, together with the epoch.
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
        """Return the sealer of this record; None if its header is damaged.

        `nonce` is 12 random bytes, which must not be used again.
        """
        head = bytes(record[:HEADER_BYTES])
        header = header_of_record(head)
        if header is None:
            return None
        sealed_head = resealed(head, SEAL_AES_GCM, self.epoch, nonce, self.key_id)
        identity = bytes(sealed_head[MARK_BYTES:])
        cipher = self._cipher(identity)
        plain = head[MARK_BYTES:]
        return Sealer(header, plain, sealed_head, identity, nonce, cipher, self.epoch)

    def open(self, record: memoryview) -> Outcome:
        """Decrypt a sealed record in place, and write its tag. Returns OK, MISS or CORRUPT.

        MISS: it names another epoch or key. CORRUPT: it is damaged or not sealed; its contents are
        then undefined.
        """
        outcome, header = self.decrypt(record), header_of_record(record)
        if outcome is Outcome.OK and header is not None:
            finish(record, header.payload_bytes)
        return outcome

    def decrypt(self, record: memoryview) -> Outcome:
        """Decrypt a sealed record in place like `open`, but write no tag.

        For a record that is decoded next: the decoded one gets a tag of its own.
        """
        sealed_head = bytes(record[:HEADER_BYTES])
        header = header_of_record(sealed_head)
        if header is None:
            return Outcome.CORRUPT
        end = HEADER_BYTES + header.payload_bytes
        if header.seal != SEAL_AES_GCM or len(record) < end + TAG_BYTES:
            return Outcome.CORRUPT
        if (header.epoch, header.key_id) != (self.epoch, self.key_id):
            return Outcome.MISS
        identity = sealed_head[MARK_BYTES:]
        head = resealed(sealed_head, SEAL_NONE, 0, bytes(NONCE_BYTES), bytes(KEY_ID_BYTES))
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
        return Outcome.OK

    def wrapped(self, domain_key: bytes, domain: bytes, nonce: bytes) -> bytes:
        """Return the key wrapped with the domain's secret, as a key ring stores it: 60 bytes."""
        sealed = _wrapping(domain_key).encrypt(
            nonce, bytes(self._secret), _wrap_context(domain, self.epoch)
        )
        return nonce + sealed

    def _cipher(self, identity: bytes) -> AESGCM:
        return _library().AESGCM(
            hashlib.blake2b(
                identity, key=self._secret, digest_size=DATA_KEY_BYTES, person=b"holdfast-block"
            ).digest()
        )


def derive(domain_key: bytes, epoch: int) -> bytes:
    """Return the secret of an epoch's data key, derived from the domain's secret."""
    return hashlib.blake2b(
        _u32(epoch), key=domain_key, digest_size=DATA_KEY_BYTES, person=b"holdfast-data"
    ).digest()


def unwrap(wrapped: bytes, domain_key: bytes, domain: bytes, epoch: int) -> bytes:
    """Return the secret of a wrapped data key; raise FormatError if it cannot be unwrapped."""
    nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
    try:
        if len(wrapped) != WRAPPED_BYTES:
            raise _library().InvalidTag
        return _wrapping(domain_key).decrypt(nonce, sealed, _wrap_context(domain, epoch))
    except _library().InvalidTag as error:
        raise FormatError(
            f"the data key of epoch {epoch} is damaged, or wrapped with another key"
        ) from error


def _wrapping(domain_key: bytes) -> AESGCM:
    return _library().AESGCM(
        hashlib.blake2b(
            b"", key=domain_key, digest_size=DATA_KEY_BYTES, person=b"holdfast-wrap"
        ).digest()
    )


def _wrap_context(domain: bytes, epoch: int) -> bytes:
    return _WRAP_CONTEXT + domain + _u32(epoch)


class _Library(NamedTuple):
    AESGCM: type[AESGCM]
    InvalidTag: type[Exception]


@functools.cache
def _library() -> _Library:
    """Import the cipher at its first use, and cache it, because an import costs time per record."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return _Library(AESGCM, InvalidTag)


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")
