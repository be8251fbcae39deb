"""Findings about a shared folder for `holdfast doctor`, and why a folder must not be used; pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.byte_size import Size
from holdfast.finding import Finding, problem
from holdfast.tiers.files.folder_probe import KEPT
from holdfast.tiers.files.requests import FolderReport

_NOT_NEEDED = "the tier does without it"

_MATTERS = ("nolock", "soft", "softerr", "hard", "lookupcache", "nconnect", "vers", "noac", "ro")
"""Mount options that change what a client sees, or how it ends: the report names those that are
set."""


def refusal(path: str, report: FolderReport) -> str:
    """Return why a folder must not be used, and the remedy; empty if it can be used.

    Of the promises of POSIX a tier needs one: a new file is whole under its name as soon as it was
    renamed. Records are verified after every read, so a later fault of the file system is a miss.
    """
    if report.not_published < report.tried:
        return ""
    return (
        f"{path} ({report.filesystem}): {report.not_published} of {report.tried} files were not "
        "whole when they were opened after their rename; mount it without that cache, or use "
        "another file system"
    )


def probe_findings(path: str, report: FolderReport) -> Sequence[Finding]:
    """Return one line for the mount, one for its space, and one for each promise."""
    refused = refusal(path, report)
    options = [option for option in report.options.split(",") if option.split("=")[0] in _MATTERS]
    mount = f"{report.filesystem} from {report.source} at {report.mount_point}"
    shown = f"{mount}, {' '.join(dict.fromkeys(options))}" if options else mount
    free = f"{Size(report.free_bytes)} of {Size(report.total_bytes)} are free"
    return [
        _mount_finding(path, shown, report),
        Finding(path, free, "the tier is bounded by its own capacity"),
        problem(path, "publishing does not work", refused)
        if refused
        else _publishing(path, report),
        _promise(path, "renaming over a name", report.rename_over),
        _promise(path, "exclusive creation", report.exclusive_create),
        _promise(path, "locks", report.lock),
        _promise(path, "extended attributes", report.attributes),
        _host_finding(path, report),
    ]


def _mount_finding(path: str, shown: str, report: FolderReport) -> Finding:
    if report.is_local:
        return Finding(
            path,
            shown,
            "only this machine sees this folder; if a shared file system belongs here, mount it, "
            "and name its type in `filesystem`",
            warning=True,
        )
    return Finding(path, shown, "hosts that mount it share what is stored", ok=True)


def _publishing(path: str, report: FolderReport) -> Finding:
    if report.not_published:
        return Finding(
            path,
            f"{report.not_published} of {report.tried} new files were not whole at once",
            "such a read is a miss; expect fewer hits than on other file systems",
            warning=True,
        )
    return Finding(path, "new files are whole under their names", ok=True)


def _promise(path: str, what: str, result: str) -> Finding:
    if result == KEPT:
        return Finding(path, f"{what}: as POSIX promises", ok=True)
    return Finding(path, f"{what}: {result}", _NOT_NEEDED, ok=True)


def _host_finding(path: str, report: FolderReport) -> Finding:
    found = f"host name {report.host_name!r}"
    if not report.same_host_name:
        return Finding(path, found, "no other machine used the folder under this name", ok=True)
    return Finding(
        path,
        f"{found} is also that of {report.same_host_name} other machines",
        "a server of NFS 4 takes machines of one name for one client, and their reads fail with "
        "EBADF; give each its own name, or set nfs.nfs4_unique_id",
        warning=True,
    )
