"""What a mistyped option is answered with."""

import pytest

from holdfast.cli import USAGE, main


def refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == USAGE
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["size", "--modle", "qwen3-8b"], "did you mean --model instead of --modle?"),
        (["size", "--slo-tft=1"], "did you mean --slo-ttft instead of --slo-tft?"),
        (["sim", "taubench", "--lader", "x"], "did you mean --ladder instead of --lader?"),
        (["bench", "seal", "--quik"], "did you mean --quick instead of --quik?"),
    ],
)
def test_the_option_that_was_meant_is_named(words, says, capsys):
    assert refused(words, capsys).endswith(says)


@pytest.mark.parametrize("words", [["size", "--xyzzy-quux"], ["size", "--us", "x"], ["sim"]])
def test_nothing_is_suggested_where_nothing_is_close(words, capsys):
    assert "did you mean" not in refused(words, capsys)
