"""Lines with block ids: 64 bits, models, delta form, and sizes that fit equally."""

import pytest

from holdfast.errors import TraceError


def line(at, tokens, *ids, **more):
    return {"timestamp": at, "input_length": tokens, "hash_ids": list(ids), **more}


@pytest.mark.parametrize("high", [2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_signed_and_unsigned_64_bit_ids_are_read(loaded, token_hit, high):
    trace = loaded([line(at, 1024, high, 5) for at in (0, 3000)] + [line(9000, 1024, high, 6)])
    assert (token_hit(trace), trace.unique) == (pytest.approx(1536 / 3072), 3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2**64], r"jsonl:2: id 18446744073709551616 has more than 64 bits"),
        ([-(2**63) - 1], "jsonl:2: id -9223372036854775809 has more than 64 bits"),
        ([-1, 2**63], "jsonl:2: ids below 0 and ids above .* are mixed"),
    ],
)
def test_ids_over_64_bits_and_mixed_signedness_are_refused(loaded, ids, message):
    with pytest.raises(TraceError, match=message):
        loaded([line(0, 512, 1), line(3000, 512 * len(ids), *ids)])
    with pytest.raises(TraceError, match="are mixed"):
        loaded([line(0, 512, -1), line(3000, 512, 2**63)])


def test_models_share_no_ids(loaded, token_hit):
    rows = [line(0, 512, 1, model="a"), line(5, 512, 1, model="b"), line(99, 512, 1, model="a")]
    trace = loaded(rows)
    assert token_hit(trace) == pytest.approx(1 / 3)
    assert trace.remarks == ("its requests name 2 models, which share no blocks",)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 512, [1]), (1000, 1024, [2])],
        [(0, 512, [1]), (1000, 512, [2]), (9000, 512, [3])],
        [(0, 4190, range(9)), (1000, 592, [90, 91])],
        [(0, 512, [1]), (1000, 1024, [2]), (5000, 1536, [3])],
    ],
)
@pytest.mark.parametrize("block_tokens", [None, 512])
def test_a_file_that_lists_new_blocks_only_is_refused(loaded, rows, block_tokens):
    lines = [line(at, tokens, *ids, session_id="s") for at, tokens, ids in rows]
    with pytest.raises(TraceError, match=r"jsonl:2: .*lists\s+new blocks only \(delta form\)"):
        loaded(lines, block_tokens=block_tokens)
    independent = [{key: row[key] for key in row if key != "session_id"} for row in lines[:2]]
    assert loaded(independent, block_tokens=block_tokens).requests == 2


def test_a_remark_says_if_few_later_requests_of_sessions_share_a_prefix(loaded):
    rows = [line(7 * n, 512, n, session_id=n % 40) for n in range(80)]
    trace = loaded([*rows, line(999, 1024, 79, 100, session_id=39)])
    assert trace.remarks[0].startswith("only 1 of the 41 later requests of its sessions begin")


def test_the_log_names_block_sizes_that_fit_equally_well(loaded, caplog):
    trace = loaded([line(9 * n * n, 500, 1) for n in range(5)])
    assert (trace.block_tokens, trace.other_block_tokens) == (256, (512, 1024, 2048, 4096))
    assert "blocks of 256 tokens are assumed, and blocks of 512 or 1,024" in caplog.text
    given = loaded([line(9 * n * n, 500, 1) for n in range(5)], block_tokens=512)
    assert (given.block_tokens, given.other_block_tokens) == (512, ())
