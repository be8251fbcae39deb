"""The key ring: every domain's data keys, wrapped, in one small file, flushed with each change.

A domain's records open with the data key of their epoch only. Take the key off the ring and they
are noise on every medium, plugged in or not. `rotate` adds an epoch; `retire` drops all but the
newest; `erase` drops them all and begins another. Several nodes may share one file: each change is
made under a lock on it, and everyone looks at it every few seconds.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.blocks.envelope import NONCE_BYTES
from holdfast.blocks.world import domain_id
from holdfast.buffers import secret_memory
from holdfast.codec.seal import DATA_KEY_BYTES, DataKey, derive, unwrap
from holdfast.errors import ConfigError, FormatError, RefusedError
from holdfast.store import keyring_file
from holdfast.store.keyring_file import Epoch, RingDomain
from holdfast.store.keyring_lock import held_for_change

EPOCHS_AHEAD = 64
"""How far beyond its own a node believes the epoch of another, where keys are derived."""


class Dropped(NamedTuple):
    """How many data keys went, and whether some of them follow from the domain's secret."""

    keys: int
    derived: bool


class _Owner(NamedTuple):
    name: str
    secret: bytes


Change = Callable[[RingDomain, "_Owner", bytes], RingDomain]


class KeyRing:
    """The data keys of the domains that this process knows the secrets of.

    `path` None keeps the ring in memory. `derives`: data keys follow from the domain's secret and
    the epoch, so that nodes that share no ring read each other's records; whoever keeps the secret
    keeps them too. Thread-safe. Raises FormatError for a file that is damaged or not a ring, and
    leaves it as it is.

    A domain that was erased, here or by another node, has no key that seals until `forgotten` says
    that nothing of it is left in the clear: the new key would make what was erased readable again.
    """

    def __init__(self, path: Path | None, *, derives: bool = False) -> None:
        self.path = path
        self.derives = derives
        self.suspended = False
        """Whether the keys were forgotten until the file can be read again."""
        self._changing = threading.RLock()
        """Held by who reads or changes the file, which may take for ever where its system hangs."""
        self._lock = threading.Lock()
        """Held for moments, by who changes what is known of the ring."""
        self._owners: dict[bytes, _Owner] = {}
        self._domains: dict[str, RingDomain] = {}
        self._keys: dict[bytes, dict[int, DataKey]] = {}
        self._erasures: dict[bytes, int] = {}
        self._erased: dict[bytes, int] = {}
        self._suspensions = 0
        self._seen: keyring_file.Stamp | None = None
        if path is not None and path.exists():
            self._domains, self._seen = keyring_file.read(path)

    def enrol(self, name: str, secret: bytes) -> str:
        """Take a domain's secret; give it its first epoch if it has none. Say what that changed.

        Raises ConfigError where the ring knows the name under another key.
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
            known = self._domains.get(domain.hex())
            if known is None or not known.epochs or known.name != name:
                epoch = self._change(domain, _named_and_begun).last
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
        """Return the data key that seals now; None for a domain that is not ours, or is erased."""
        keys = self._keys.get(domain)
        # In this order: a key that came with an erasure was there after its mark.
        return keys[max(keys)] if keys and domain not in self._erased else None

    def find(self, domain: bytes, epoch: int, key_id: bytes) -> DataKey | None:
        """Return the data key that a header names; None if it is not on the ring (any more)."""
        key = self._keys.get(domain, {}).get(epoch) or self._ahead(domain, epoch)
        return key if key is not None and key.key_id == key_id else None

    def erasures(self, domain: bytes) -> int:
        """Return how many erasures of a domain this process has seen."""
        return self._erasures.get(domain, 0)

    def is_away(self, domain: bytes) -> bool:
        """Return whether a domain's keys are away for now: forgotten, or not to be used yet."""
        return self.suspended or domain in self._erased

    def rotate(self, name: str) -> int:
        """Begin another epoch, which seals from now on; return its number."""
        return self._change(self._domain(name), _begun).last

    def retire(self, name: str) -> int:
        """Drop every epoch but the newest; return how many those were.

        Raises RefusedError, and drops none, where a key to drop follows from the domain's secret.
        """
        dropped: list[Epoch] = []

        def retired(known: RingDomain, owner: _Owner, domain: bytes) -> RingDomain:
            del owner, domain
            dropped[:] = known.epochs[:-1]
            derived = [str(each.epoch) for each in dropped if not each.wrapped]
            if derived:
                raise RefusedError(
                    f"domain {name!r}: data keys follow from the domain's key in epochs "
                    f"{', '.join(derived)}, so they can not be destroyed; nothing was changed; "
                    "erase the domain, and destroy that key on every node"
                )
            return msgspec.structs.replace(known, epochs=known.epochs[-1:])

        self._change(self._domain(name), retired)
        return len(dropped)

    def erase(self, name: str) -> Dropped:
        """Drop every data key of a domain and begin another epoch; return what was dropped."""
        dropped: list[Epoch] = []

        def erased(known: RingDomain, owner: _Owner, domain: bytes) -> RingDomain:
            dropped[:] = known.epochs
            gone = msgspec.structs.replace(known, epochs=[], erasures=known.erasures + 1)
            return _begun(gone, owner, domain)

        self._change(self._domain(name), erased)
        return Dropped(len(dropped), self.derives or not all(each.wrapped for each in dropped))

    def look(self) -> None:
        """Read the file again if another node changed it.

        Raises OSError where it can not be read and FormatError where it is damaged; what was
        known before holds.
        """
        if self.path is None:
            return
        with self._changing:
            suspensions = self._suspensions
            if keyring_file.stamp(self.path) != self._seen:
                self._install(*keyring_file.read(self.path), suspensions)

    def erased(self) -> dict[bytes, int]:
        """Return the domains that were erased and of which not all is forgotten yet.

        For each how many erasures of it were seen, as `forgotten` wants to be told.
        """
        with self._lock:
            return dict(self._erased)

    def forgotten(self, domain: bytes, erasures: int) -> None:
        """Say that nothing from before so many erasures is left: the domain's keys seal again."""
        with self._lock:
            if self._erased.get(domain) == erasures:
                del self._erased[domain]

    def suspend(self) -> None:
        """Forget every data key until `look` can read the file again: nothing opens meanwhile.

        Waits for nobody: a file system that hangs may keep who reads the file, or changes it.
        """
        with self._lock:
            self._keys = {}
            self._seen, self.suspended = None, True
            self._suspensions += 1

    def name(self, domain: bytes) -> str:
        """Return the configured name of a domain."""
        return self._owners[domain].name

    def listing(self) -> list[dict[str, Any]]:
        """Return domains and epochs, configured here or not, as plain data; no key among them."""
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
        """Derive the key of an epoch that another node has begun, where keys are derived."""
        known, owner = self._domains.get(domain.hex()), self._owners.get(domain)
        if not self.derives or self.suspended or known is None or owner is None:
            return None
        if not known.last < epoch <= known.last + EPOCHS_AHEAD:
            return None
        return DataKey(derive(owner.secret, epoch), epoch)

    def _change(self, domain: bytes, change: Change) -> RingDomain:
        """Change one domain, on the medium first. Raises RefusedError where that fails."""
        # Where it is a link, the file itself is replaced: others go to it by ways of their own.
        path = Path(os.path.realpath(self.path)) if self.path is not None else None
        with self._changing, held_for_change(path):
            suspensions = self._suspensions
            if path is not None and (self._domains or path.exists()):
                self._look_first(path)
            owner = self._owners[domain]
            known = self._domains.get(domain.hex(), RingDomain(owner.name))
            changed = change(known, owner, b"" if self.derives else domain)
            domains = {**self._domains, domain.hex(): changed}
            seen = keyring_file.write(path, domains) if path is not None else None
            self._install(domains, seen, suspensions)
            return changed

    def _install(
        self,
        domains: dict[str, RingDomain],
        seen: keyring_file.Stamp | None,
        suspensions: int,
    ) -> None:
        """Take what the file says, unless the keys were forgotten since somebody began to read it.

        It is read once more then: it may have been old when it came.
        """
        damaged: FormatError | None = None
        with self._lock:
            if suspensions != self._suspensions:
                return
            before, self._domains = self._domains, domains
            self._seen = None  # until all of it is understood
            self._note_erasures(before)
            for domain in self._owners:
                try:
                    self._load(domain)
                except FormatError as error:
                    damaged = error
            if damaged is None:
                self._seen, self.suspended = seen, False
        if damaged is not None:
            raise damaged

    def _look_first(self, path: Path) -> None:
        """Read what is there before it is changed: a ring that is away is not made anew."""
        try:
            self.look()
        except OSError as error:
            raise RefusedError(
                f"keyring: {str(path)!r} can not be read: {error.strerror}; nothing was changed; "
                "put it back, or restart the node to begin another"
            ) from error

    def _note_erasures(self, before: dict[str, RingDomain]) -> None:
        """Mark the domains whose keys went, before any new key of theirs is here.

        One that left the ring, or came back to it, counts: nobody knows what was done meanwhile.
        """
        for domain in self._erasures:
            was, now = before.get(domain.hex()), self._domains.get(domain.hex())
            if (was is None) != (now is None) or (was and now and now.erasures > was.erasures):
                self._erasures[domain] += 1
                self._erased[domain] = self._erasures[domain]

    def _load(self, domain: bytes) -> None:
        """Unwrap what is on the ring for one of our domains; forget what is not."""
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
            key = DataKey(secret, each.epoch)
            before = held.get(each.epoch)
            same = before is not None and before.key_id == key.key_id
            keys[each.epoch] = (
                before if before and same else DataKey(secret_memory(secret), each.epoch)
            )
        self._erasures.setdefault(domain, 0)
        self._keys[domain] = keys


def _begun(known: RingDomain, owner: _Owner, domain: bytes) -> RingDomain:
    """Add an epoch: with a random key, or a derived one if no `domain` is given."""
    epoch, wrapped = known.last + 1, ""
    if domain:
        secret = secrets.token_bytes(DATA_KEY_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        wrapped = DataKey(secret, epoch).wrapped(owner.secret, domain, nonce).hex()
    made = datetime.now(UTC).isoformat(timespec="seconds")
    epochs = [*known.epochs, Epoch(epoch, made, wrapped)]
    return msgspec.structs.replace(known, epochs=epochs, last=epoch)


def _named_and_begun(known: RingDomain, owner: _Owner, domain: bytes) -> RingDomain:
    """Take the name that the configuration gives; begin an epoch if there is none."""
    known = msgspec.structs.replace(known, name=owner.name)
    return known if known.epochs else _begun(known, owner, domain)
