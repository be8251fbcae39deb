"""Configuration: YAML, environment and flags, in this order, read once into frozen structs.

HOLDFAST__TIERS__1__CAPACITY="64 GiB"    overrides tiers.1.capacity of the file
"""

from holdfast.byte_size import Size
from holdfast.config.check import check_domain_name
from holdfast.config.defaults import (
    PRIVATE_PARENT,
    arm_failpoint,
    default_address,
    default_tiers,
    machine_address,
    notify_address,
)
from holdfast.config.options import (
    Config,
    DomainOptions,
    EngineOptions,
    HostOptions,
    RegisterOptions,
    TracesOptions,
    tier_kind,
)
from holdfast.config.read import as_data, load, parse
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.disk.kind import DiskOptions
from holdfast.tiers.option_checks import DEADLINE_S_MAX
from holdfast.tiers.pool.kind import PoolOptions

__all__ = [
    "DEADLINE_S_MAX",
    "PRIVATE_PARENT",
    "Config",
    "CxlOptions",
    "DiskOptions",
    "DomainOptions",
    "EngineOptions",
    "HostOptions",
    "PoolOptions",
    "RegisterOptions",
    "Size",
    "TracesOptions",
    "arm_failpoint",
    "as_data",
    "check_domain_name",
    "default_address",
    "default_tiers",
    "load",
    "machine_address",
    "notify_address",
    "parse",
    "tier_kind",
]
