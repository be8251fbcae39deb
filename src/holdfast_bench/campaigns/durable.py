"""Durable campaign: kill -9 right after `sync` acknowledged a context, which must not be lost.

Each process checks what earlier ones acknowledged, then saves and syncs contexts and reports each
acknowledgement, until it is killed within moments of one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from holdfast.limits import MIB
from holdfast.policy.retention import Retention
from holdfast.store.durable import sync
from holdfast_bench.campaigns.campaign import FORCED_SWITCH_S, CampaignBudget, CampaignResult
from holdfast_bench.campaigns.contexts import Contexts, chain_of
from holdfast_bench.campaigns.crash import CHAIN_BLOCKS, PAYLOAD_BYTES, open_store
from holdfast_bench.harness.lifetime import die_with

ACKNOWLEDGED_KEPT = 24
"""Acknowledged contexts that each process checks, at most."""

DISK_BYTES = 64 * MIB
"""Room for many times as much as is saved while these are kept: the disk must not evict them."""

SYNC_S = 30.0
_ACKNOWLEDGEMENTS_MAX = 3
_AFTER_S = 0.002


def run(budget: CampaignBudget) -> Iterator[CampaignResult]:
    """Kill processes with a store after their acknowledgements."""
    result = CampaignResult("durable", "kills")
    folder = budget.folder / "durable"
    acknowledged: list[str] = []
    for cycle, rng in enumerate(budget.rounds(result)):
        _cycle(result, folder, acknowledged, cycle, rng)
        del acknowledged[:-ACKNOWLEDGED_KEPT]
    yield result


def _cycle(
    result: CampaignResult, folder: Path, acknowledged: list[str], cycle: int, rng: random.Random
) -> None:
    """Start a process, kill it after some acknowledgements, and add what it acknowledged."""
    read_end, write_end = os.pipe()
    owner = os.getpid()
    with warnings.catch_warnings():  # the child uses nothing that another thread may hold a lock of
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        die_with(owner)
        _live(folder, acknowledged, cycle, write_end)
    os.close(write_end)
    before = rng.randint(1, _ACKNOWLEDGEMENTS_MAX)
    with os.fdopen(read_end, "rb") as report:
        for line in report:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "kept":
                acknowledged.append(rest)
                before -= 1
            elif word == "checked":
                result.counts["contexts found again"] += int(rest)
            elif word == "closed":  # before this process was scheduled to kill it
                result.counts["lived on"] += 1
            else:
                result.fail(f"kill {result.tried}: {word} {rest}")
            if before == 0:
                time.sleep(rng.uniform(0, _AFTER_S))
                os.kill(process, signal.SIGKILL)
                before = -1
    _, status = os.waitpid(process, 0)
    result.tried += os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def _live(folder: Path, acknowledged: list[str], cycle: int, report: int) -> None:
    """Run the forked process: check, then save and sync; writes a line for each to `report`."""
    sys.setswitchinterval(FORCED_SWITCH_S)
    os.setpgid(0, 0)  # Ctrl-C must not reach this process
    try:
        with open_store(folder, DISK_BYTES) as store:
            contexts = Contexts(store, PAYLOAD_BYTES)
            contexts.await_recovery()
            for name in acknowledged:
                found = contexts.read(chain_of(name, CHAIN_BLOCKS))
                if found != CHAIN_BLOCKS:
                    os.write(report, f"lost {name}: {found} of {CHAIN_BLOCKS} blocks\n".encode())
            os.write(report, b"checked %d\n" % len(acknowledged))
            for number in range(2 * _ACKNOWLEDGEMENTS_MAX):
                name = f"durable/{cycle}/{number}"
                chain = chain_of(name, CHAIN_BLOCKS)
                contexts.save(chain, Retention.DURABLE)
                if sync(store, contexts.namespace, chain, SYNC_S) == CHAIN_BLOCKS:
                    os.write(report, f"kept {name}\n".encode())
        os.write(report, b"closed\n")
    except BaseException as error:  # noqa: BLE001  # the parent must see any error
        os.write(report, f"wrong {error!r}\n".encode())
    finally:
        os._exit(0)
