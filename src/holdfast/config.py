"""Every option of Holdfast, read once: YAML, then environment, then flags, into frozen structs.

The only module that reads the environment. Unknown keys are refused; every error starts with the
key's path and names the value, the limit and the remedy.

    HOLDFAST__TIERS__1__CAPACITY="64 GiB"    the same as tiers.1.capacity in the file
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.errors import ConfigError
from holdfast.limits import GIB, KIB, LEASE_S, MIB
from holdfast.probe import memory
from holdfast.wire.address import UNIX, exposed_addresses, is_tcp

ENVIRONMENT_PREFIX = "HOLDFAST__"
HOST_BYTES_DEFAULT = 4 * GIB
DISK_BYTES_DEFAULT = 16 * GIB
HOST_BYTES_MIN = 16 * MIB
DISK_BYTES_MIN = 16 * MIB
DEADLINE_S_MAX = 60.0
LEASE_S_MAX = 3600.0
PRIVATE_PARENT = "/var/tmp"  # noqa: S108  # a fresh 0700 folder is made below it

S = TypeVar("S", bound=msgspec.Struct)

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": KIB * GIB}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_AT = re.compile(r" - at `\$?(.*)`$")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\.{3}")


class Size(int):
    """A number of bytes, written as such or as text such as "64 GiB"."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Size:
        """Read a size; raise ValueError saying how to write one."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2].lower() not in _UNITS:
            raise ValueError('not a size; write bytes, or a number and a unit such as "64 GiB"')
        return cls(float(found[1]) * _UNITS[found[2].lower()])

    def __str__(self) -> str:
        """Return the size in the largest unit that leaves a readable number."""
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self >= _UNITS[unit.lower()]:
                return f"{int(self) / _UNITS[unit.lower()]:.4g} {unit}"
        return f"{int(self)} B"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HostOptions(_Section, frozen=True, tag="host", tag_field="kind"):
    """The host tier: memory that all domains share, in bytes."""

    capacity: Size


class DiskOptions(_Section, frozen=True, tag="disk", tag_field="kind"):
    """A disk tier: a folder of its own, the bytes it may use, and the size of its regions."""

    path: str
    capacity: Size
    region: Size | None = None


class DomainOptions(_Section, frozen=True):
    """A trust domain; `key_file` holds its 32-byte key, as it is or as 64 hex digits."""

    key_file: str


class TlsOptions(_Section, frozen=True):
    """PEM files for TLS: this node's certificate, its key, and who signs the other side's."""

    cert: str
    key: str
    ca: str


class TokenOptions(_Section, frozen=True):
    """Tokens: what a target knows them by, and the one that this node shows.

    `key_file` holds 32 bytes, or 64 hex digits; `file` what `holdfast token` wrote last.
    """

    key_file: str = ""
    file: str = ""


class EngineOptions(_Section, frozen=True):
    """What an engine's connector wants to know.

    `deadline_s`: a fetch that takes longer is given up and recomputed. `save` False: only read.
    `model_digest`: pins the model's identity instead of deriving it from the model's files.
    """

    deadline_s: float = 5.0
    save: bool = True
    model_digest: str = ""


class Config(_Section, frozen=True):
    """Everything a node, and an engine beside it, is told.

    `write`: copy new blocks to the next tier soon after (`behind`) or only when they must leave
    memory (`on_eviction`). `lease_s`: an engine that has not copied by then has lost its claim.
    """

    listen: str | list[str]
    tiers: list[HostOptions | DiskOptions]
    domains: dict[str, DomainOptions] = {}
    write: Literal["behind", "on_eviction"] = "behind"
    lease_s: float = LEASE_S
    engine: EngineOptions = EngineOptions()
    tls: TlsOptions | None = None
    tokens: TokenOptions = TokenOptions()

    @property
    def addresses(self) -> list[str]:
        """Every address this node listens on."""
        return [self.listen] if isinstance(self.listen, str) else self.listen

    @property
    def node_address(self) -> str:
        """The Unix socket for engines of this machine; empty for a target and nothing else."""
        return next((address for address in self.addresses if not is_tcp(address)), "")

    @property
    def target_addresses(self) -> list[str]:
        """The TCP addresses for other nodes."""
        return [address for address in self.addresses if is_tcp(address)]


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "": Config,
    "tiers": DiskOptions,
    "domains": DomainOptions,
    "engine": EngineOptions,
    "tls": TlsOptions,
    "tokens": TokenOptions,
}


def load(
    file: str = "",
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    private: str = "",
) -> Config:
    """Read the file, put environment and flags (`{"tiers.1.capacity": "8 GiB"}`) over it, check.

    What the file does not say is as this machine suggests; `private` names the folder of a node
    that listens and stores there. Raises ConfigError.
    """
    data = _read(file) if file else {}
    if private:
        data["listen"] = f"{UNIX}{private}/node.sock"
    if "tiers" not in data:
        data["tiers"] = as_data(embedded_config(private or _cache_folder()))["tiers"]
    environment = os.environ if environment is None else environment
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _put(data, keys, environment[name], name)
    for path, value in (flags or {}).items():
        _put(data, path.split("."), value, path)
    data.setdefault("listen", default_address(environment))
    return parse(data, Path(file).parent if file else Path.cwd())


def parse(data: Mapping[str, Any], folder: Path | None = None) -> Config:
    """Turn plain data into a checked Config; relative paths count from `folder`."""
    try:
        config = msgspec.convert(data, Config, strict=False, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, data)) from error
    config = _absolute(config, folder or Path.cwd())
    _check(config)
    return config


def as_data(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data that `parse` accepts; sizes are bytes."""
    data: dict[str, Any] = msgspec.to_builtins(config, enc_hook=int)
    return data


def embedded_config(folder: str) -> Config:
    """Return what a private node of an engine uses: memory, and a disk tier in `folder`.

    The disk tier takes at most a quarter of what is free; one that is there keeps its size.
    """
    tiers: list[HostOptions | DiskOptions] = [HostOptions(capacity=_host_bytes())]
    blocks = Path(folder, "disk", "blocks.holdfast")
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    nbytes = min(DISK_BYTES_DEFAULT, shutil.disk_usage(there).free // 4)
    if blocks.exists():
        nbytes = blocks.stat().st_size
    if nbytes >= DISK_BYTES_MIN:
        tiers.append(DiskOptions(path=f"{folder}/disk", capacity=Size(nbytes)))
    return Config(listen=f"{UNIX}{folder}/node.sock", tiers=tiers)


def default_address(environment: Mapping[str, str] | None = None) -> str:
    """Return where this user's node listens if nobody says otherwise."""
    environment = os.environ if environment is None else environment
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/holdfast" if runtime else f"/tmp/holdfast-{os.getuid()}"  # noqa: S108
    return f"{UNIX}{folder}/node.sock"


def notify_address() -> str:
    """Return where systemd wants to be told that the node is ready; empty without systemd."""
    return os.environ.get("NOTIFY_SOCKET", "")


def _host_bytes() -> Size:
    return Size(max(HOST_BYTES_MIN, min(HOST_BYTES_DEFAULT, memory().nbytes // 5)))


def _cache_folder() -> str:
    """Return the folder of a node that was told none: kept, unlike an embedded one's."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "holdfast"))


def _read(file: str) -> dict[str, Any]:
    import yaml

    try:
        text = Path(file).read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: can not be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds {type(data).__name__}, not key: value lines")
    return data


def _put(data: dict[str, Any], keys: list[str], value: str, name: str) -> None:
    """Set one value deep inside plain data, making what is missing on the way."""
    here: dict[str, Any] | list[Any] = data
    for key, after in zip(keys, [*keys[1:], ""], strict=True):
        place: Any = _place(here, key, name)
        if not after:
            here[place] = value
        elif here[place] is None:
            here[place] = [] if after.isdecimal() else {}
        here = here[place]


def _place(here: object, key: str, name: str) -> str | int:
    """Return where `key` is in `here`, after making room for it."""
    if isinstance(here, dict):
        here.setdefault(key, None)
        return key
    if not isinstance(here, list) or not key.isdecimal() or int(key) > len(here):
        raise ConfigError(f"{name}: {key!r} is no place in {here!r:.60}; correct the name")
    if int(key) == len(here):
        here.append(None)
    return int(key)


def _custom(kind: type, value: object) -> object:
    if kind is Size:
        return Size.of(value)
    raise NotImplementedError(f"no reader for {kind.__name__}")


def _explain(error: msgspec.ValidationError, data: Mapping[str, Any]) -> str:
    """Put the key's path first, then the value, what is wrong with it, and the remedy."""
    found = _AT.search(str(error))
    keys = [] if found is None else _KEY.findall(found[1])
    value: Any = data
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    what = _AT.sub("", str(error)).replace("`", "'").replace("Object ", "")
    plain = isinstance(value, str | int | float) and keys
    shown = f"{value!r}: " if plain else ""
    path = ".".join("*" if key == "..." else key for key in keys) or "configuration"
    return f"{path}: {shown}{what}; {_remedy(what, keys, value)}"


def _remedy(what: str, keys: list[str], value: object) -> str:
    if "unknown field" in what:
        section: type[msgspec.Struct] = _SECTIONS[keys[0] if keys else ""]
        if section is DiskOptions and isinstance(value, dict) and value.get("kind") == "host":
            section = HostOptions
        return f"remove it; known here: {', '.join(_keys(section))}"
    if "Invalid value" in what:
        return "use one of: host, disk"
    if "Invalid enum value" in what:
        return "use one of: behind, on_eviction"
    return "add it" if "missing" in what else "correct it"


def _keys(section: type[msgspec.Struct]) -> tuple[str, ...]:
    tag = section.__struct_config__.tag_field
    return (*([tag] if tag else []), *section.__struct_fields__)


def _absolute(config: Config, folder: Path) -> Config:
    def resolved(path: str) -> str:
        return str((folder / Path(path).expanduser()).absolute())

    replace = msgspec.structs.replace
    return replace(
        config,
        tiers=[
            replace(tier, path=resolved(tier.path)) if isinstance(tier, DiskOptions) else tier
            for tier in config.tiers
        ],
        domains={
            name: replace(domain, key_file=resolved(domain.key_file))
            for name, domain in config.domains.items()
        },
        tls=config.tls and _resolved(config.tls, resolved),
        tokens=_resolved(config.tokens, resolved),
    )


def _resolved(section: S, resolved: Callable[[str], str]) -> S:
    """Return a section of nothing but paths with those that are given made absolute."""
    paths = {name: path for name, path in msgspec.structs.asdict(section).items() if path}
    return msgspec.structs.replace(section, **{k: resolved(v) for k, v in paths.items()})


def _check(config: Config) -> None:
    _check_listen(config)
    _check_tiers(config)
    for name in config.domains:
        if not _DOMAIN.fullmatch(name):
            raise ConfigError(
                f"domains.{name}: a domain's name has 1 to 64 of a-z, 0-9, _ and -; rename it"
            )
    _within("lease_s", config.lease_s, LEASE_S_MAX)
    _within("engine.deadline_s", config.engine.deadline_s, DEADLINE_S_MAX)


def _check_listen(config: Config) -> None:
    try:
        exposed = exposed_addresses(config.addresses)
    except ConfigError as error:
        raise ConfigError(f"listen: {error}") from error
    if exposed and not (config.tls or config.tokens.key_file):
        raise ConfigError(
            f"listen: {exposed[0]!r} can be reached from other machines, and nothing says who may "
            "come in; set tls, or tokens.key_file, or listen on tcp://127.0.0.1"
        )


def _check_tiers(config: Config) -> None:
    kinds = [type(tier) for tier in config.tiers]
    if kinds.count(HostOptions) != 1 or kinds[0] is not HostOptions:
        names = ", ".join("host" if kind is HostOptions else "disk" for kind in kinds) or "nothing"
        raise ConfigError(
            f"tiers: {names} given; name one host tier, first, then any disk tiers, fastest first"
        )
    limit = memory()
    paths: dict[str, int] = {}
    for number, tier in enumerate(config.tiers):
        at = f"tiers.{number}.capacity"
        least = HOST_BYTES_MIN if isinstance(tier, HostOptions) else DISK_BYTES_MIN
        if tier.capacity < least:
            raise ConfigError(f"{at}: {tier.capacity} is less than {Size(least)}; raise it")
        if isinstance(tier, HostOptions) and tier.capacity > limit.nbytes:
            raise ConfigError(
                f"{at}: {tier.capacity} asked, {limit.source} is {Size(limit.nbytes)}; lower it"
            )
        if isinstance(tier, DiskOptions) and paths.setdefault(tier.path, number) != number:
            raise ConfigError(
                f"tiers.{number}.path: {tier.path!r} is the folder of tiers.{paths[tier.path]} "
                "too; give each disk tier its own"
            )


def _within(at: str, value: float, limit: float) -> None:
    if not 0 < value <= limit:
        raise ConfigError(f"{at}: {value:g} s is not above 0 and at most {limit:g} s")
