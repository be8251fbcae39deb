"""Probe what an object store does, by one small object: never assume it from "S3-compatible".

Some stores ignore ranges and answer with the whole object, some ignore conditions, and some create
a bucket whose name is misspelt.
"""

from __future__ import annotations

import secrets
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from holdfast.errors import Outcome
from holdfast.finding import Finding, problem
from holdfast.limits import KIB
from holdfast.tiers.object.store import ABSENT, Store
from holdfast.tiers.segments.medium import MediumProbe

_OBJECT_BYTES = 64 * KIB
_RANGE = (10_000, 5_000)
"""Start and length of the range that is read."""

RANGES_REFUSAL = (
    "the store does not serve ranges of objects (it answered {answer}); use a store that does, "
    "because one block is a small part of an object"
)
NO_DELETE = (
    "segments that leave the tier stay in the bucket, and the tier is full once they fill its "
    "capacity; permit the credentials to delete objects"
)
BUCKET_REFUSAL = "there is no bucket of {url}; create it, or correct url"


async def probe_store(store: Store, url: str) -> MediumProbe:
    """Return what the store does; raises an exception of obstore if it does not answer.

    Lists first: a put would make some stores create a bucket that does not exist.
    """
    try:
        async for _ in obstore.list(store, prefix="probe", chunk_size=1):
            break
    except ABSENT:
        return MediumProbe(Outcome.OK, BUCKET_REFUSAL.format(url=url))
    except BaseError as error:
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            return MediumProbe(Outcome.OK, BUCKET_REFUSAL.format(url=url))
        raise
    name, data = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(_OBJECT_BYTES)
    try:
        put: Any = await obstore.put_async(store, name, data, use_multipart=False)
    except (PermissionDeniedError, UnauthenticatedError):
        return MediumProbe(
            Outcome.OK, read_only="the credentials permit reads only", findings=[_unknown_ranges()]
        )
    try:
        refusal = await _range_refusal(store, name, data)
        findings = [
            _conclusion("ranges", "served" if not refusal else "not served", ok=not refusal)
        ]
        findings.append(await _create_finding(store, name, data))
        findings.append(await _etag_finding(store, name, data, put))
    finally:
        not_deleted = await _delete_findings(store, name)
    return MediumProbe(Outcome.OK, refusal, findings=[*findings, *not_deleted])


async def _delete_findings(store: Store, name: str) -> list[Finding]:
    """Delete the object; return a finding if the credentials do not permit that."""
    try:
        await obstore.delete_async(store, name)
    except BaseError as error:  # another fault says nothing about permissions
        # S3 answers for each object of a deletion; obstore raises no error of its own for that.
        is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
        if is_refused or "code: AccessDenied" in str(error):
            return [problem("deletions", "the credentials do not permit them", NO_DELETE)]
    return []


async def _range_refusal(store: Store, name: str, data: bytes) -> str:
    """Return why ranges of the store cannot be used; empty if they can."""
    start, length = _RANGE
    try:
        found = await obstore.get_range_async(store, name, start=start, length=length)
    except (*ABSENT, PermissionDeniedError, UnauthenticatedError):
        raise
    except BaseError as error:
        words = " ".join(str(error).split())
        if "partial" in words.lower() or "range" in words.lower():
            return RANGES_REFUSAL.format(answer="with the whole object or another range")
        raise
    if bytes(found) != data[start : start + length]:
        return RANGES_REFUSAL.format(answer=f"{len(found)} other bytes")
    return ""


async def _create_finding(store: Store, name: str, data: bytes) -> Finding:
    try:
        await obstore.put_async(store, name, data, mode="create")
    except AlreadyExistsError:
        return _conclusion("create if absent", "refused a second time, as it should", ok=True)
    except BaseError:
        return _conclusion("create if absent", "not supported", ok=None)
    return _conclusion("create if absent", "ignored by the store", ok=None)


async def _etag_finding(store: Store, name: str, data: bytes, put: Any) -> Finding:  # noqa: ANN401
    """Replace the object, then try to replace it by its first ETag, which is stale."""
    etag = put.get("e_tag")
    if not etag:
        return _conclusion("replace if ETag matches", "no ETag", ok=None)
    try:
        await obstore.put_async(store, name, data[::-1], use_multipart=False)
        await obstore.put_async(store, name, data, mode={"e_tag": etag}, use_multipart=False)
    except PreconditionError:
        return _conclusion("replace if ETag matches", "refuses a stale ETag", ok=True)
    except BaseError:
        return _conclusion("replace if ETag matches", "not supported", ok=None)
    return _conclusion("replace if ETag matches", "ignored by the store", ok=None)


def _unknown_ranges() -> Finding:
    return _conclusion("ranges", "not tried, because nothing can be written", ok=None)


def _conclusion(what: str, found: str, *, ok: bool | None) -> Finding:
    why = "Holdfast works without" if ok is None else ""
    return Finding(what, found, why, ok=ok)
