"""Steps of a demo scroll by, whatever walks ends with them, and the verdict names what failed."""

from typing import NamedTuple

import pytest

from holdfast.cli import demo_steps

Console = pytest.importorskip("rich.console").Console


class Step(NamedTuple):
    name: str
    equal: bool = True
    ok: bool = True


FINE, WRONG = Step("fine"), Step("wrong", equal=False, ok=False)
MISSED = Step("missed", ok=False)


def test_every_step_is_told_when_it_is_done(capsys):
    def walk():
        yield FINE
        assert capsys.readouterr().out == "fine 1\n"
        yield MISSED

    steps, elapsed_s = demo_steps.follow(
        walk(), lambda done: f"{done[-1].name} {len(done)}", Console()
    )
    assert capsys.readouterr().out == "missed 2\n"
    assert steps == [FINE, MISSED]
    assert elapsed_s >= 0


def test_what_walks_ends_when_telling_fails():
    ended = []

    def walk():
        try:
            yield FINE
        finally:
            ended.append(True)

    def breaks(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_steps.follow(walk(), breaks, Console())
    assert ended


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([FINE, FINE], "2 steps in 3 s. Well done."),
        ([FINE, WRONG], "2 steps in 3 s. [red]Output differs: wrong.[/]"),
        (
            [MISSED, WRONG],
            (
                "2 steps in 3 s. [red]Output differs: wrong.[/] "
                f"[red]Not from where it should have come: missed.[/] {demo_steps.REMEDY}"
            ),
        ),
    ],
)
def test_the_verdict_praises_or_names_what_failed(steps, words):
    assert demo_steps.verdict(steps, 3.2, "Well done.") == words
