"""Validity of certificates and tokens: when they begin and end, and what to do before they end.

Certificates are read as DER (RFC 5280) as far as their validity, because the standard library
decodes a certificate only from a connection that was accepted.
"""

from __future__ import annotations

import base64
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import ConfigError
from holdfast.finding import Finding, problem
from holdfast.limits import MIB
from holdfast.regular_file import read_regular
from holdfast.status import CredentialState
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.token import WITHOUT_VERB, limits_of

CERTIFICATE_WARN_S = 14 * 86_400.0
"""Time before the end of a certificate at which warnings begin, in seconds.

A certificate that is valid for less than six weeks is due in the last third of its life instead.
"""

_LAST_SHARE = 1 / 3

TOKEN_WARN_S = 120.0
"""Time before the end of a token at which warnings begin, in seconds; tokens live ten minutes."""

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _EXPLICIT_0, _UTC_TIME = 0x30, 0xA0, 0x17
_LONG_FORM = 0x80
_DATE_MAX_S = 253_402_300_799.0
"""The last second of the year 9999, after which there is no date."""

_CENTURY = 50
"""Years of two digits below this are of the century 2000 (RFC 5280, 4.1.2.5.1)."""


class Validity(NamedTuple):
    """The period in which a certificate or token is valid, in Unix seconds."""

    begins_s: float
    expires_s: float


def credential_states(
    credentials: Credentials, now_s: float | None = None
) -> list[CredentialState]:
    """Return the state of each file of credentials; reads the files."""
    now_s = time.time() if now_s is None else now_s
    states = list[CredentialState]()
    if (tls := credentials.tls) is not None:
        states.append(certificate_state("tls.cert", tls.cert, now_s))
        states.append(certificate_state("tls.ca", tls.ca, now_s))
    file = credentials.token_file
    try:
        if token := credentials.token():
            validity = Validity(0.0, float(token.claims.expires))
            state = _state("tokens.file", file, validity, now_s)
            states.append(msgspec.structs.replace(state, may=token.claims.may))
    except ConfigError as error:
        states.append(CredentialState("tokens.file", file, trouble=str(error)))
    return states


def certificate_state(setting: str, file: str, now_s: float | None = None) -> CredentialState:
    """Return the state of a file of certificates that `setting` names; reads the file."""
    now_s = time.time() if now_s is None else now_s
    try:
        found = [_validity(der) for der in _certificates_of(read_regular(Path(file), MIB))]
    except OSError as error:
        return CredentialState(setting, file, trouble=f"cannot be read: {error.strerror}")
    except ValueError as error:
        return CredentialState(setting, file, trouble=f"holds no certificate in PEM: {error}")
    if setting.endswith("ca"):  # authorities: one that is valid is enough
        validity = max(found, key=lambda one: (one.begins_s <= now_s, one.expires_s))
    else:  # a chain: all must be valid
        validity = Validity(max(one.begins_s for one in found), min(one.expires_s for one in found))
    return _state(setting, file, validity, now_s)


def credential_finding(state: CredentialState) -> Finding:
    """Return the finding of a check: a problem, a warning, or how long the file is valid."""
    if state.trouble:
        return problem(state.setting, state.file, state.trouble)
    why = f"{state.period}; renew it" if state.soon else state.period
    limits = ""
    if state.setting == "tokens.file" and (limits := limits_of(state.may)):
        losses = "; ".join(loss for verb, loss in WITHOUT_VERB.items() if verb not in state.may)
        limits = f"; {limits}: this node may {', '.join(state.may)} at its pool's targets: {losses}"
    return Finding(
        state.setting, state.file, why + limits, ok=True, warning=bool(state.soon or limits)
    )


def _state(setting: str, file: str, validity: Validity, now_s: float) -> CredentialState:
    """Return the state at `now_s`, in words."""
    is_token = setting.startswith("token")
    what = "token" if is_token else "certificate"
    begins_s, expires_s = validity
    left_s = expires_s - now_s
    warn_s = min(CERTIFICATE_WARN_S, _LAST_SHARE * (expires_s - begins_s))
    warn_s = TOKEN_WARN_S if is_token else warn_s
    trouble = ""
    if now_s < begins_s:
        trouble = f"the {what} is not valid before {_date(begins_s)}, in {_words(begins_s - now_s)}"
        trouble += "; compare this machine's clock"
    elif left_s <= 0:
        remedy = "make a new one with `holdfast token`" if is_token else "renew it"
        trouble = f"the {what} expired on {_date(expires_s)}, {_words(-left_s)} ago; {remedy}"
    return CredentialState(
        setting=setting,
        file=file,
        begins_s=begins_s,
        expires_s=expires_s,
        period=f"expires on {_date(expires_s)}, in {_words(left_s)}" if left_s > 0 else "expired",
        trouble=trouble,
        soon=left_s < warn_s,
    )


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(min(unix_s, _DATE_MAX_S), UTC).strftime("%Y-%m-%d %H:%M UTC")


def _words(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, unit_s in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * unit_s or (unit == "day" and seconds >= unit_s):
            number = int(seconds // unit_s)
            return f"{number:,} {unit}{'s' * (number != 1)}"
    return f"{seconds:.0f} s"


def _certificates_of(pem: bytes) -> list[bytes]:
    """Return the DER of each certificate in a PEM file; raise ValueError if there is none."""
    found = [base64.b64decode(each) for each in _PEM.findall(pem)]
    if not found:
        raise ValueError("no line BEGIN CERTIFICATE")
    return found


def _validity(der: bytes) -> Validity:
    """Return the validity of one certificate; raise ValueError if it is not one."""
    try:
        _, certificate, _ = _element(der, 0)
        _, content, _ = _element(certificate, 0)
        tag, _, after = _element(content, 0)
        at = after if tag == _EXPLICIT_0 else 0  # the version, which may be missing
        for _ in range(3):  # serial number, signature algorithm, issuer
            _, _, at = _element(content, at)
        tag, validity, _ = _element(content, at)
        if tag != _SEQUENCE:
            raise ValueError("its validity is missing")
        kind, begins, at = _element(validity, 0)
        until_kind, expires, _ = _element(validity, at)
        return Validity(_unix_s(kind, begins), _unix_s(until_kind, expires))
    except IndexError as error:
        raise ValueError("it is truncated") from error


def _element(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and the content of the DER element at `at`, and where the next one begins."""
    tag, size = der[at], der[at + 1]
    at += 2
    if size >= _LONG_FORM:
        size, at = int.from_bytes(der[at : (end := at + size - _LONG_FORM)]), end
    if at + size > len(der):
        raise IndexError
    return tag, der[at : at + size], at + size


def _unix_s(tag: int, text: bytes) -> float:
    """Convert an UTCTime (two digits of the year) or GeneralizedTime to Unix seconds."""
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("20" if int(digits[:2]) < _CENTURY else "19") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
