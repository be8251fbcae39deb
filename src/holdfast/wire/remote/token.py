"""Tokens: short-lived signed lines that admit a node to a target.

    hft1.CLAIMS.SECRET     CLAIMS: base64url of JSON {"peer", "may", "expires"}
                           SECRET: base64url of HMAC-SHA256(key, "holdfast-token-1" + CLAIMS)

The targets share `key`; a node needs only its token's line. The secret is never sent: a peer shows
its claims and proves the secret over two fresh nonces, one from each side, so that a recording of
one connection cannot be used to open another. The target proves the secret in return. Later
messages are protected by TLS only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from holdfast.errors import ConfigError, RefusedError
from holdfast.limits import TOKEN_S_MAX
from holdfast.prepared import prepared

MARK = "hft1"
NONCE_BYTES = 32
TOKEN_CHARS_MAX = 4096
PEER_CHARS_MAX = 256
CLOCK_SKEW_S = 60.0
"""Largest difference between the issuer's and a target's clock at which tokens work, in seconds.

A target adds it to both limits: a token is accepted for this long after its end, and with up to
`TOKEN_S_MAX` plus this left. So a token of any permitted lifetime works from the moment it is made
on a target whose clock is behind, and to its last second on one whose clock is ahead.
"""

Verb = Literal["read", "write", "delete"]
VERBS: tuple[Verb, ...] = ("read", "write", "delete")

WITHOUT_VERB: dict[Verb, str] = {
    "read": "it finds and fetches nothing there, and cannot check them",
    "write": "it writes no new blocks to them",
    "delete": "records of erased domains and retired data keys stay there",
}
"""What does not work for a host whose token lacks a permission; "them": the targets."""

_PERSON = b"holdfast-token-1"
_UNIX_S_MAX = 1 << 40


@prepared
class TokenClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token's claims: the peer, what it may do, and the expiry in Unix seconds."""

    peer: str
    may: tuple[Verb, ...]
    expires: Annotated[int, msgspec.Meta(ge=0, le=_UNIX_S_MAX)]


class Token(NamedTuple):
    """A parsed token: the claims as signed text, the claims parsed, and the secret."""

    text: str
    claims: TokenClaims
    secret: bytes


def issue(key: bytes, peer: str, may: Sequence[Verb], lifetime_s: float, now: float) -> str:
    """Return a token; raise ConfigError for a name or lifetime that no target would accept."""
    if not 0 < lifetime_s <= TOKEN_S_MAX:
        raise ConfigError(
            f"a lifetime of {lifetime_s:g} s is not above 0 and at most {TOKEN_S_MAX:g} s; "
            "choose another"
        )
    if not 0 < len(peer) <= PEER_CHARS_MAX or not peer.isprintable():
        raise ConfigError(
            f"a peer's name of {len(peer)} characters is not 1 to {PEER_CHARS_MAX} that "
            "can be printed; choose another with --peer"
        )
    text = _encode(msgspec.json.encode(TokenClaims(peer, tuple(may), int(now + lifetime_s))))
    return f"{MARK}.{text}.{_encode(_secret(key, text))}"


def read(line: str) -> Token:
    """Parse a token without its key; raise ConfigError if it is not a token."""
    mark, _, rest = line.strip().partition(".")
    text, _, secret = rest.partition(".")
    try:
        if mark != MARK or len(line) > TOKEN_CHARS_MAX:
            raise ValueError
        return Token(text, _claims(text), _decode(secret))
    except ValueError as error:
        raise ConfigError(
            f"token: a line of {len(line)} characters is no token; make one with `holdfast token`"
        ) from error


def check(key: bytes, text: str, now: float) -> Token:
    """Return the token that claims belong to, for `proves`.

    Does not check who signed the claims: if it was another key, the returned secret differs from
    the peer's, and `proves` fails.
    Raises RefusedError for claims that are expired, or valid for too long, by more than
    `CLOCK_SKEW_S`.
    """
    try:
        claims = _claims(text)
    except ValueError as error:
        raise RefusedError(
            "token: the claims cannot be read; make one with `holdfast token`"
        ) from error
    if claims.expires <= now - CLOCK_SKEW_S:
        raise RefusedError(
            f"token: expired {now - claims.expires:.0f} s ago by this target's clock, and clocks "
            f"may differ by {CLOCK_SKEW_S:g} s; make a new one with `holdfast token`, or, if this "
            "one is new, compare the clocks"
        )
    if claims.expires > now + TOKEN_S_MAX + CLOCK_SKEW_S:
        raise RefusedError(
            f"token: valid for {claims.expires - now:.0f} s more by this target's clock, the limit "
            f"is {TOKEN_S_MAX:g} s, and clocks may differ by {CLOCK_SKEW_S:g} s; make one with "
            "`holdfast token`, and compare the clocks"
        )
    return Token(text, claims, _secret(key, text))


def limits_of(may: Sequence[str]) -> str:
    """Return in words which permissions a token lacks; empty if it has all."""
    missing = [verb for verb in VERBS if verb not in may]
    if missing == ["write", "delete"]:
        return "read-only token"
    return f"token without {' and '.join(missing)}" if missing else ""


def nonce() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: Token, side: Literal["peer", "target"], nonces: bytes) -> bytes:
    """Return the proof that this side knows the token's secret; `nonces`: the target's first."""
    return hmac.digest(token.secret, side.encode() + b"\0" + nonces, hashlib.sha256)


def proves(token: Token, side: Literal["peer", "target"], nonces: bytes, proof: bytes) -> bool:
    """Whether a proof is that side's, compared in constant time."""
    return hmac.compare_digest(prove(token, side, nonces), proof)


def _secret(key: bytes, text: str) -> bytes:
    return hmac.digest(key, _PERSON + text.encode(), hashlib.sha256)


def _claims(text: str) -> TokenClaims:
    if len(text) > TOKEN_CHARS_MAX:
        raise ValueError(f"claims of {len(text)} characters")
    return msgspec.json.decode(_decode(text), type=TokenClaims)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
