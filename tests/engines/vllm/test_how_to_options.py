"""The commands of the pages about vLLM are understood by vLLM and by the bindings they name.

Engines run those of `vllm.md` and `prefill-decode.md`; see `test_how_to_vllm.py`.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from holdfast.engines.vllm.encoder.options import read_encoder_options
from holdfast.engines.vllm.options import read_options
from holdfast.engines.vllm.tier.options import read_tier_options

HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to"
SERVER = "vllm serve MODEL "


def shown(page):
    """Return what vLLM makes of the command of a page."""
    text = (HOW_TO / f"{page}.md").read_text()
    [command] = re.findall(rf"^{re.escape(SERVER)}(.*?)^```", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)


def test_the_connector_of_the_page_is_there_and_takes_its_options():
    transfer = shown("vllm").kv_transfer_config
    module = importlib.import_module(transfer.kv_connector_module_path)
    assert hasattr(module, transfer.kv_connector)
    settings = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
    assert settings.address == "unix:///run/holdfast/node.sock"
    assert transfer.kv_load_failure_policy == "recompute"


def test_the_tier_of_the_page_is_there_and_takes_its_options():
    args = shown("vllm-offloading")
    [tier] = args.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    assert hasattr(importlib.import_module(tier.pop("module_path")), tier.pop("type"))
    assert read_tier_options(tier).node.address == "unix:///run/holdfast/node.sock"
    assert args.prefix_caching_hash_algo == "sha256_cbor"


def test_the_encoder_connector_of_the_page_is_there_and_takes_its_options():
    transfer = shown("vllm-encoders").ec_transfer_config
    module = importlib.import_module(transfer.ec_connector_module_path)
    assert hasattr(module, transfer.ec_connector)
    settings = read_encoder_options(transfer.ec_connector_extra_config)
    assert settings.address == "unix:///run/holdfast/node.sock"
