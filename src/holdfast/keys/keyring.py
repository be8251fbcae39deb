"""The key ring: the wrapped data keys of all domains, in one small file, flushed at each change.

A record can be decrypted only with its domain's data key of its epoch. Destroying that key makes
the record unreadable on every medium, also on one that is detached (crypto-shredding). `rotate`
adds an epoch; `retire` drops all but the newest; `erase` drops all and begins another. Several
nodes may share the file: a node changes it under a file lock, and reads it every few seconds.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.envelope import NONCE_BYTES
from holdfast.blocks.namespace import domain_id
from holdfast.buffers import secret_memory
from holdfast.codec.seal import DATA_KEY_BYTES, DataKey, derive, unwrap
from holdfast.errors import ConfigError, FormatError, RefusedError
from holdfast.keys import keyring_file
from holdfast.keys.keyring_file import DataKeyEpoch, RingDomain

EPOCHS_AHEAD = 64
"""Epochs beyond its own newest that a node accepts from other nodes, if keys are derived."""


class DestroyedKeys(NamedTuple):
    """Number of data keys dropped, and whether some can be derived from the domain's secret."""

    keys: int
    derived: bool


class _Owner(NamedTuple):
    name: str
    secret: bytes


Change = Callable[[RingDomain], RingDomain]


class PendingSweeps:
    """Domains whose copies must be swept after a change of their keys. Thread-safe.

    `lock` is the ring's, so that a change and its note are one step. `seen`: number of changes of
    each domain that this process has seen.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.seen: dict[bytes, int] = {}
        self._pending: dict[bytes, int] = {}
        self._lock = lock

    def __contains__(self, domain: bytes) -> bool:
        return domain in self._pending

    def note(self, domain: bytes) -> None:
        """Count a change; the caller holds the lock."""
        self.seen[domain] = self._pending[domain] = self.seen.get(domain, 0) + 1

    def pending(self) -> dict[bytes, int]:
        """Return the domains to sweep, each with the changes seen, to be passed to `done`."""
        with self._lock:
            return dict(self._pending)

    def done(self, domain: bytes, seen: int) -> None:
        """Report that no copy from before the change number `seen` is left."""
        with self._lock:
            if self._pending.get(domain) == seen:
                del self._pending[domain]


class KeyRing:
    """The data keys of the domains whose secrets this process knows. Thread-safe.

    `path` None keeps the ring in memory. `derives`: data keys are derived from the domain's secret
    and the epoch, so that nodes without a common ring can read each other's records. A holder of
    the secret can then always derive them. Raises FormatError for a file that is damaged or not a
    ring, and does not change it.

    After an erasure, here or by another node, a domain has no sealing key until `erasures.done`
    reports that none of its blocks is left in plaintext. Otherwise the new key would seal erased
    blocks, which would make them readable again.
    """

    def __init__(self, path: Path | None, *, derives: bool = False) -> None:
        self.path = path
        self.derives = derives
        self.suspended = False
        """Whether the keys are dropped until the file can be read again."""
        self._changing = threading.RLock()
        """Held while the file is read or changed, without limit if its file system hangs."""
        self._lock = threading.Lock()
        """Held briefly while the attributes below change."""
        self._owners: dict[bytes, _Owner] = {}
        self._domains: dict[str, RingDomain] = {}
        self._keys: dict[bytes, dict[int, DataKey]] = {}
        self.erasures = PendingSweeps(self._lock)
        """Erased domains; their keys do not seal until `done` reports that no old block is left."""
        self.retirements = PendingSweeps(self._lock)
        """Domains with dropped data keys, whose copies may still be indexed."""
        self._suspensions = 0
        self._seen: keyring_file.Stamp | None = None
        # A dangling link raises an error, because blocks may be sealed with the ring it named.
        if path is not None and os.path.lexists(path):
            self._domains, self._seen = keyring_file.read(path)

    def enrol(self, name: str, secret: bytes) -> str:
        """Add a domain's secret, and begin its first epoch if it has none.

        Returns a description of the change to the ring; empty if there was none. Raises ConfigError
        if the ring has the name under another secret.
        """
        domain = domain_id(secret)
        with self._changing:
            for other, of_name in self._domains.items():
                if of_name.name == name and other != domain.hex() and of_name.epochs:
                    raise ConfigError(
                        f"domains.{name}: {self._where()} has data keys of {name!r} under another "
                        f"key (domain id {other}); give that key, or choose another keyring file"
                    )
            self._owners[domain] = _Owner(name, secret)

            def renamed(known: RingDomain) -> RingDomain:
                known = msgspec.structs.replace(known, name=name)
                return known if known.epochs else self._with_new_epoch(domain, known)

            known = self._domains.get(domain.hex())
            if known is None or not known.epochs or known.name != name:
                epoch = self._change(domain, renamed).last
                if known is not None and known.name != name:
                    return f"renamed from {known.name!r}"
                return f"epoch {epoch}"
            with self._lock:
                self._load(domain)
            return ""

    def enrolled(self) -> list[bytes]:
        """Return the ids of the domains whose secrets were given."""
        return list(self._owners)

    def current(self, domain: bytes) -> DataKey | None:
        """Return the current sealing key; None for an unknown domain, or one being erased."""
        keys = self._keys.get(domain)
        # Read the keys first: an erasure is marked before its new key is added.
        return keys[max(keys)] if keys and domain not in self.erasures else None

    def find(self, domain: bytes, epoch: int, key_id: bytes) -> DataKey | None:
        """Return the data key that a header names; None if it is not on the ring."""
        key = self._keys.get(domain, {}).get(epoch) or self._ahead(domain, epoch)
        return key if key is not None and key.key_id == key_id else None

    def opens(self, domain: bytes, epoch: int) -> bool:
        """Return whether the data key of an epoch is on the ring."""
        return epoch in self._keys.get(domain, {}) or self._ahead(domain, epoch) is not None

    def has_destroyed(self, domain: bytes, epoch: int) -> bool:
        """Return whether the ring once had a data key of an epoch, and has it no more.

        False for an epoch that it never had: another ring may have sealed with it.
        """
        known = self._domains.get(domain.hex())
        kept = [each.epoch for each in known.epochs] if known else []
        return known is not None and 0 < epoch <= known.last and epoch not in kept

    def is_away(self, domain: bytes) -> bool:
        """Return whether a domain's keys are unavailable: suspended, or being erased."""
        return self.suspended or domain in self.erasures

    def rotate(self, name: str) -> int:
        """Begin another epoch, whose key seals from now on; return its number."""
        domain = self._domain(name)
        return self._change(domain, partial(self._with_new_epoch, domain)).last

    def epochs(self, name: str) -> list[int]:
        """Return the epochs of a domain that have a data key, oldest first."""
        domain = self._domain(name)
        with self._lock:
            known = self._domains.get(domain.hex())
            return [each.epoch for each in known.epochs] if known else []

    def check_retirable(self, name: str) -> None:
        """Raise RefusedError if `retire` would drop a key that is derived from the secret."""
        domain = self._domain(name)
        with self._lock:
            known = self._domains.get(domain.hex())
            _check_random(name, known.epochs[:-1] if known else [])

    def retire(self, name: str, newest: int | None = None) -> int:
        """Drop every epoch but the newest; return the number dropped.

        Raises RefusedError, and drops none, if a key to drop is derived from the domain's secret,
        or if the newest epoch is not the caller's `newest`.
        """
        dropped: list[DataKeyEpoch] = []

        def retired(known: RingDomain) -> RingDomain:
            dropped[:] = known.epochs[:-1]
            _check_random(name, dropped)
            if newest is not None and known.last != newest:
                raise RefusedError(
                    f"domain {name!r}: epoch {known.last} was begun while blocks were counted, "
                    f"after epoch {newest}; nothing was changed; retire again"
                )
            return msgspec.structs.replace(known, epochs=known.epochs[-1:])

        self._change(self._domain(name), retired)
        return len(dropped)

    def erase(self, name: str) -> DestroyedKeys:
        """Drop every data key of a domain and begin another epoch; return the keys dropped."""
        domain, dropped = self._domain(name), list[DataKeyEpoch]()

        def erased(known: RingDomain) -> RingDomain:
            dropped[:] = known.epochs
            gone = msgspec.structs.replace(known, epochs=[], erasures=known.erasures + 1)
            return self._with_new_epoch(domain, gone)

        self._change(domain, erased)
        derived = self.derives or not all(each.wrapped for each in dropped)
        return DestroyedKeys(len(dropped), derived)

    def look(self) -> None:
        """Read the file again if another node changed it.

        Raises OSError if it cannot be read and FormatError if it is damaged; the keys stay as they
        were.
        """
        if self.path is None:
            return
        with self._changing:
            suspensions = self._suspensions
            if keyring_file.stamp(self.path) != self._seen:
                self._install(*keyring_file.read(self.path), suspensions)

    def suspend(self) -> None:
        """Drop every data key until `look` can read the file again; until then no record opens.

        Does not wait for a thread that reads or changes the file, because its file system may hang.
        """
        with self._lock:
            self._keys = {}
            self._seen, self.suspended = None, True
            self._suspensions += 1

    def name(self, domain: bytes) -> str:
        """Return the configured name of a domain."""
        return self._owners[domain].name

    def listing(self) -> list[dict[str, Any]]:
        """Return domains and epochs, configured here or not, as plain data without keys."""
        with self._lock:
            ours = {domain.hex() for domain in self._owners}
            return [
                {
                    "domain": known.name,
                    "id": domain,
                    "configured": domain in ours,
                    "epochs": [{"epoch": each.epoch, "made": each.made} for each in known.epochs],
                    "erasures": known.erasures,
                    "derived": any(not each.wrapped for each in known.epochs),
                }
                for domain, known in self._domains.items()
            ]

    def _domain(self, name: str) -> bytes:
        for domain, owner in self._owners.items():
            if owner.name == name:
                return domain
        names = ", ".join(sorted(owner.name for owner in self._owners.values())) or "none"
        raise RefusedError(f"domain {name!r} has no data keys here; those that have: {names}")

    def _where(self) -> str:
        return f"the key ring {str(self.path)!r}" if self.path else "the key ring in memory"

    def _ahead(self, domain: bytes, epoch: int) -> DataKey | None:
        """Derive the key of an epoch that another node has begun; None if keys are not derived."""
        known, owner = self._domains.get(domain.hex()), self._owners.get(domain)
        if not self.derives or self.suspended or known is None or owner is None:
            return None
        if not known.last < epoch <= known.last + EPOCHS_AHEAD:
            return None
        return DataKey(derive(owner.secret, epoch), epoch)

    def _change(self, domain: bytes, change: Change) -> RingDomain:
        """Change one domain, on the medium first. Raises RefusedError if that fails."""
        # Replace a link's target, not the link: other nodes may use other paths to it.
        path = Path(os.path.realpath(self.path)) if self.path is not None else None
        with self._changing, keyring_file.held_for_change(path):
            suspensions = self._suspensions
            if path is not None and (self._domains or path.exists()):
                try:  # so that a ring that is unreachable is not replaced
                    self.look()
                except OSError as error:
                    raise RefusedError(
                        f"keyring: {str(path)!r} cannot be read: {error.strerror}; nothing was "
                        "changed; restore the file, or restart the node to begin another ring"
                    ) from error
            known = self._domains.get(domain.hex(), RingDomain(self._owners[domain].name))
            changed = change(known)
            domains = {**self._domains, domain.hex(): changed}
            seen = keyring_file.write(path, domains) if path is not None else None
            self._install(domains, seen, suspensions)
            return changed

    def _with_new_epoch(self, domain: bytes, known: RingDomain) -> RingDomain:
        """Add an epoch, with a random or a derived key."""
        epoch, wrapped = known.last + 1, ""
        if not self.derives:
            key = DataKey(secrets.token_bytes(DATA_KEY_BYTES), epoch)
            nonce = secrets.token_bytes(NONCE_BYTES)
            wrapped = key.wrapped(self._owners[domain].secret, domain, nonce).hex()
        made = datetime.now(UTC).isoformat(timespec="seconds")
        epochs = [*known.epochs, DataKeyEpoch(epoch, made, wrapped)]
        return msgspec.structs.replace(known, epochs=epochs, last=epoch)

    def _install(
        self, domains: dict[str, RingDomain], seen: keyring_file.Stamp | None, suspensions: int
    ) -> None:
        """Install the file's contents, unless `suspend` was called since its read began.

        The contents may be outdated in that case; the next `look` reads the file again.
        """
        damaged: FormatError | None = None
        with self._lock:
            if suspensions != self._suspensions:
                return
            before, self._domains = self._domains, domains
            self._seen = None  # until every key is unwrapped
            # Mark what was erased before the new keys are loaded. A domain that disappeared from
            # the ring, or reappeared, counts as erased: an erasure may have happened since.
            for domain in self.erasures.seen:
                was, now = before.get(domain.hex()), domains.get(domain.hex())
                if (was is None) != (now is None) or (was and now and now.erasures > was.erasures):
                    self.erasures.note(domain)
            for domain in self._owners:
                was, now = before.get(domain.hex()), domains.get(domain.hex())
                kept = {each.epoch for each in now.epochs} if now else set()
                if was and any(each.epoch not in kept for each in was.epochs):
                    self.retirements.note(domain)
            for domain in self._owners:
                try:
                    self._load(domain)
                except FormatError as error:
                    damaged = error
            if damaged is None:
                self._seen, self.suspended = seen, False
        if damaged is not None:
            raise damaged

    def _load(self, domain: bytes) -> None:
        """Unwrap the keys of an enrolled domain, and drop those that are not on the ring."""
        owner = self._owners[domain]
        known = self._domains.get(domain.hex(), RingDomain(owner.name))
        held, keys = self._keys.get(domain, {}), dict[int, DataKey]()
        for each in known.epochs:
            try:
                secret = (
                    unwrap(bytes.fromhex(each.wrapped), owner.secret, domain, each.epoch)
                    if each.wrapped
                    else derive(owner.secret, each.epoch)
                )
            except (FormatError, ValueError) as error:
                raise FormatError(f"{self._where()}: {owner.name!r}: {error}") from error
            before = held.get(each.epoch)
            if before is None or before.key_id != DataKey(secret, each.epoch).key_id:
                before = DataKey(secret_memory(secret), each.epoch)
            keys[each.epoch] = before
        self.erasures.seen.setdefault(domain, 0)
        self._keys[domain] = keys


def _check_random(name: str, epochs: Sequence[DataKeyEpoch]) -> None:
    """Raise RefusedError if a key is derived, because only random keys can be destroyed."""
    derived = [str(each.epoch) for each in epochs if not each.wrapped]
    if derived:
        word = "epoch" if len(derived) == 1 else "epochs"
        raise RefusedError(
            f"domain {name!r}: the data keys are derived from the domain's key in {word} "
            f"{', '.join(derived)}, so they cannot be destroyed; nothing was changed; "
            "erase the domain, and destroy that key on every node"
        )
