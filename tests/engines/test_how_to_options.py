"""The options that the pages about SGLang and LMCache show are those that the bindings take."""

import json
import re
from pathlib import Path

import pytest

from holdfast.engines.lmcache.options import read_adapter_options
from holdfast.engines.sglang.options import read_options

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
NODE = "unix:///run/holdfast/node.sock"


def shown(page, option):
    """Return the values of an option in the commands of a page."""
    text = (HOW_TO / f"{page}.md").read_text()
    return [json.loads(each) for each in re.findall(rf"{option} '(.*?)'", text, re.DOTALL)]


@pytest.mark.parametrize(("number", "layout"), [(0, "exact"), (1, "portable")])
def test_the_storage_of_the_page_takes_its_options(number, layout):
    extra = shown("sglang", "--hicache-storage-backend-extra-config")[number]
    assert (extra["module_path"], extra["class_name"]) == (
        "holdfast.engines.sglang",
        "HoldfastStorage",
    )
    options = read_options(extra)
    assert options.layout == layout


def test_the_adapter_of_the_page_takes_its_options():
    [adapter] = shown("lmcache", "--l2-adapter")
    assert (adapter["module_path"], adapter["class_name"]) == (
        "holdfast.engines.lmcache",
        "HoldfastL2Adapter",
    )
    assert read_adapter_options(adapter["adapter_params"]).holdfast == NODE
