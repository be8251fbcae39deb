"""One rank of an SGLang server: what it computes, and the blocks of its host pools in a node."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

from holdfast.client.engine import EngineGroup
from holdfast.client.engine_opening import open_engine
from holdfast.client.named_blocks import open_named_session
from holdfast.client.opening import open_store
from holdfast.engines.sglang.describe import (
    ENGINE,
    PoolDescription,
    fingerprint_of,
    is_replicated,
    portable_fingerprint_of,
    refuse_images,
    refuse_portable,
    served_model,
)
from holdfast.engines.sglang.host_pool import HostPool
from holdfast.engines.sglang.options import EXTRA_CONFIG, StorageOptions
from holdfast.engines.sglang.page_names import PageNames, rename_pages
from holdfast.engines.sglang.pages import pages_of
from holdfast.engines.sglang.portable_pool import HostPoolPages, PortablePool
from holdfast.errors import ConfigError
from holdfast.version import __version__
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Drop, Hello, ReportReply

DROP_S = 30.0
"""Timeout of dropping the blocks of one pool from the node."""

_log = logging.getLogger("sglang.holdfast")


class ArgumentsInEffect:
    """SGLang's arguments as its engine computes with them.

    These are the command line's, what SGLang chose for those that it does not name, and changes of
    the running server. The record that `get_server_args` returns has the command line's only.
    """

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.runtime_context import get_context

        try:
            return get_context().config_leaf(name)
        except ValueError as error:
            raise AttributeError(str(error)) from None


class ServedRank:
    """Makes the stored pools of one rank.

    `config`: SGLang's HiCacheStorageConfig. Raises HoldfastError for a model that cannot be served.
    """

    def __init__(self, config: Any, options: StorageOptions) -> None:
        import sglang
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        arguments = self._arguments = ArgumentsInEffect()
        self._config, self._options = config, options
        refuse_images(ModelConfig.from_server_args(get_server_args()), options)
        self._model = served_model(arguments, options, sglang.__version__, _device(arguments))
        if options.layout == "portable":
            refuse_portable(arguments, config, options)
        self._in_place = bool((config.extra_config or {}).get("interface_v1"))

    def host_pool(self, name: str, pool: Any) -> HostPool | PortablePool:
        """Return one of SGLang's host pools with its blocks; connects to the node."""
        if self._options.layout == "portable":
            return self._portable_pool(name, pool)
        pages = pages_of(pool, in_place=self._in_place or name != "kv")
        described = PoolDescription(name, pages.arrangement, pages.page_bytes)
        fingerprint = fingerprint_of(self._model, self._config, pool, described)
        options = self._options
        session = open_named_session(options.holdfast, fingerprint, options.domain, ENGINE)
        writes = self._config.is_storage_writer or not is_replicated(self._config, pool)
        _log.info(
            "pool %s: pages of %d bytes, fingerprint %s, node %s",
            *(name, pages.page_bytes, fingerprint.digest().hex(), options.holdfast),
        )
        return HostPool(pages, session, fingerprint.digest(), writes=writes)

    def _portable_pool(self, name: str, pool: Any) -> PortablePool:
        if name != "kv":
            raise ConfigError(
                f"{EXTRA_CONFIG}: layout is portable, but the model has a pool {name} beside its "
                "KV pool, whose pages have no portable form; omit layout"
            )
        options = self._options
        device = HostPoolPages(pool)
        fingerprint = portable_fingerprint_of(self._arguments, options, device.layout)
        group = EngineGroup(fingerprint)
        with open_store(options.holdfast, domain=options.domain) as node:
            engine = open_engine(node, [group], peer=f"{ENGINE} {__version__}")
        names = PageNames(lambda: engine.context([]).chains[0])
        rename_pages(names)
        _log.info(
            "pool %s: portable blocks of %d bytes, fingerprint %s, node %s",
            *(name, device.layout.raw_bytes, fingerprint.digest().hex(), options.holdfast),
        )
        return PortablePool(device, engine, names)

    def drop(self, pool: HostPool | PortablePool) -> None:
        """Drop the blocks of a pool from the node's own tiers; shared tiers keep theirs.

        Raises HoldfastError if the node does not answer, or does not let this user drop blocks.
        """
        with closing(Client(self._options.holdfast, Hello(PROTOCOL, ENGINE), DROP_S)) as client:
            client.call(Drop(pool.fingerprint.hex()), ReportReply, DROP_S)


def _device(arguments: Any) -> str:
    """Return what the server computes on, as its vendor names it."""
    import torch

    if arguments.device == "cuda":
        return str(torch.cuda.get_device_name())
    if arguments.device == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return str(arguments.device)
