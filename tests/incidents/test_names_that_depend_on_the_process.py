"""Names made with Python's own hash: other ones in every process, and easily made to collide.

`hash(None)` depended on an address, so ranks disagreed and never hit; 64 bits without a key let
anybody construct a block that passes for another's.
Threads: https://github.com/LMCache/LMCache/issues/1139 https://github.com/LMCache/LMCache/issues/2136
https://github.com/LMCache/LMCache/issues/2979 https://github.com/vllm-project/vllm/issues/8229
CVE-2025-25183, CVE-2026-10813
"""

import subprocess
import sys

SCRIPT = """
from holdfast.blocks.key import Chain
chain = Chain(bytes(32), b"f" * 16, 4, {1: [b"image"]})
chain.extend([7, 8, 9, 10, 11, 12, 13, 14, 15])
print(chain.packed().hex())
"""


def names(seed):
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_every_process_computes_the_same_keys_of_full_width():
    assert names("1") == names("2") == names("random")
    assert len(names("1").strip()) == 2 * 2 * 16
