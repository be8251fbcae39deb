"""What is prepared is decoded by many threads at once from the first time on."""

import subprocess
import sys

RACE = """
import sys, threading
from typing import Literal
import msgspec
from holdfast.prepared import prepared

sys.setswitchinterval(1e-6)
fields = [(f"f{number}", Literal["said", "meant"]) for number in range(6)]
data = msgspec.json.encode({name: "said" for name, _ in fields})
for number in range(300):
    kind = prepared(msgspec.defstruct(f"S{number}", fields))
    barrier, said = threading.Barrier(4), []

    def decode():
        barrier.wait()
        said.append(msgspec.json.decode(data, type=kind).f5)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["said"] * 4
"""


def test_a_prepared_type_can_be_first_decoded_by_many_threads_at_once():
    ended = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
