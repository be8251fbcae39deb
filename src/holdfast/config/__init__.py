"""Every option of Holdfast, read once: YAML, then environment, then flags, into frozen structs.

HOLDFAST__TIERS__1__CAPACITY="64 GiB"    the same as tiers.1.capacity in the file
"""

from holdfast.config.check import DEADLINE_S_MAX
from holdfast.config.defaults import (
    PRIVATE_PARENT,
    arm_failpoint,
    default_address,
    embedded_config,
    notify_address,
)
from holdfast.config.options import (
    Config,
    CxlOptions,
    DiskOptions,
    DomainOptions,
    EngineOptions,
    HostOptions,
    MooncakeOptions,
    PoolOptions,
    RegisterOptions,
    ScrubOptions,
    Size,
    TierOptions,
    TlsOptions,
    TokenOptions,
    ValkeyOptions,
)
from holdfast.config.read import as_data, load, parse

__all__ = [
    "DEADLINE_S_MAX",
    "PRIVATE_PARENT",
    "Config",
    "CxlOptions",
    "DiskOptions",
    "DomainOptions",
    "EngineOptions",
    "HostOptions",
    "MooncakeOptions",
    "PoolOptions",
    "RegisterOptions",
    "ScrubOptions",
    "Size",
    "TierOptions",
    "TlsOptions",
    "TokenOptions",
    "ValkeyOptions",
    "arm_failpoint",
    "as_data",
    "default_address",
    "embedded_config",
    "load",
    "notify_address",
    "parse",
]
