"""The bench of the codec: trained KV shrinks as far as was promised, and every row is there."""

from collections import defaultdict
from typing import Any

import pytest

from holdfast.codec.codec import codec_named
from holdfast_bench.harness.paired_runs import Speed
from holdfast_bench.measure import codec


@pytest.mark.parametrize("part", [0, 1, None])
@pytest.mark.parametrize("nbytes", [192 << 10, 3 << 20])
def test_trained_keys_and_values_take_at_most_1_over_1_45_of_their_bytes(part, nbytes):
    raw = codec.block(nbytes, part)
    stored, back = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    length = codec_named("planes").encode(raw, stored, 2)
    assert nbytes / length >= 1.45
    codec_named("planes").decode(stored[:length], back)
    assert bytes(back) == bytes(raw)


def test_a_compressor_that_is_not_installed_has_a_row_that_says_so(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'zipper'", name="zipper")

    monkeypatch.setattr(codec, "OTHERS", {"zipper": missing})
    monkeypatch.setattr(codec, "BLOCK_BYTES", 1 << 20)
    rows = {row.what: row for row in [*codec.codec_rows(2), *codec.other_rows(2)]}
    assert list(rows) == [
        "codec.ratio.keys",
        "codec.ratio.values",
        "codec.encode",
        "codec.decode",
        "codec.record.encode",
        "codec.record.decode",
        "codec.int8.stored",
        "codec.int8.quantise",
        "codec.int8.encode",
        "codec.int8.decode",
        "codec.zipper",
    ]
    assert rows["codec.zipper"].more["why"] == "zipper is not installed here"
    assert rows["codec.ratio.keys"].ok
    assert rows["codec.int8.stored"].ok


def test_two_stores_that_are_compared_have_the_same_history(monkeypatch):
    done = defaultdict(list)

    class Recorder:
        def __init__(self, store, *_args, **_options):
            self._done = done[store]

        def hold(self, contexts):
            self._done.append(("hold", contexts))

        def fetch(self):
            self._done.append(("fetch", 1))
            return Speed(1.0, 0.0)

    monkeypatch.setattr(codec, "BenchedStore", Recorder)
    monkeypatch.setattr(codec, "block", bytes)
    fetches: Any = codec._fetches
    fetches("ours", "plain", 5)
    assert done["ours"] == done["plain"]
    assert done["ours"].count(("hold", codec._CONTEXTS)) == codec._CHOICES + 1
