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


def probe_findings(report: FolderReport) -> Sequence[Finding]:
    """Return one line for the mount, one for its space, and one for each promise."""
    free = f"{Size(report.free_bytes)} of {Size(report.total_bytes)} are free"
    return [
        _mount_finding(report),
        Finding("space", free, "the tier is bounded by its own capacity"),
        _publishing_finding(report),
        _promise("renaming over a name", report.rename_over),
        _promise("exclusive creation", report.exclusive_create),
        _promise("locks", report.lock),
        _promise("extended attributes", report.attributes),
        _host_finding(report),
    ]


def _mount_finding(report: FolderReport) -> Finding:
    options = [option for option in report.options.split(",") if option.split("=")[0] in _MATTERS]
    source = f"{report.filesystem} from {report.source} at {report.mount_point}"
    shown = ", ".join(filter(None, [source, " ".join(dict.fromkeys(options))]))
    if report.is_local:
        why = (
            "only this machine sees this folder; if a shared file system belongs here, mount it, "
            "and name its type in `filesystem`"
        )
        return Finding("mount", shown, why, ok=True, warning=True)
    return Finding("mount", shown, "hosts that mount it share what is stored", ok=True)


def _publishing_finding(report: FolderReport) -> Finding:
    if not report.not_published:
        return Finding("publishing", "new files are whole under their names", ok=True)
    found = f"{report.not_published} of {report.tried} new files were not whole at once"
    if report.not_published == report.tried:
        return problem("publishing", found, "a tier needs this; use another file system")
    why = "such a read is a miss; expect fewer hits than on other file systems"
    return Finding("publishing", found, why, ok=True, warning=True)


def _promise(what: str, result: str) -> Finding:
    if result == KEPT:
        return Finding(what, "as POSIX promises", ok=True)
    return Finding(what, result, _NOT_NEEDED, ok=True)


def _host_finding(report: FolderReport) -> Finding:
    if not report.same_host_name:
        why = "no other machine used the folder under this name"
        return Finding("host name", repr(report.host_name), why, ok=True)
    found = f"{report.host_name!r} is also that of {report.same_host_name} other machines"
    why = (
        "a server of NFS 4 takes machines of one name for one client, and their reads fail with "
        "EBADF; give each its own name, or set nfs.nfs4_unique_id"
    )
    return Finding("host name", found, why, ok=True, warning=True)
