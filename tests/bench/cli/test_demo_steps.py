"""Steps of a demo scroll by, whatever walks ends with them, and the verdict names what failed."""

from typing import NamedTuple

import pytest

from holdfast_bench.cli import demo_steps
from holdfast_bench.cli.progress import Steps

Console = pytest.importorskip("rich.console").Console


class Step(NamedTuple):
    name: str
    equal: bool = True
    ok: bool = True
    cause: str = ""


FINE, WRONG = Step("fine"), Step("wrong", equal=False, ok=False)
MISSED = Step("missed", ok=False, cause="the connector: late [again]")


ABOUT = {"fine": "is right", "missed": "is late"}


def test_every_step_is_printed_when_it_is_done(capsys, monkeypatch):
    def walk():
        yield FINE
        assert capsys.readouterr().out == "fine 1 is right\n"
        yield MISSED

    monkeypatch.setattr(
        demo_steps, "line", lambda done, about: f"{done[-1].name} {len(done)} {about}"
    )
    steps, elapsed_s = demo_steps.follow(walk(), ABOUT, Steps(Console(), None))
    assert capsys.readouterr().out == "missed 2 is late\n"
    assert steps == [FINE, MISSED]
    assert elapsed_s >= 0


def test_the_demo_is_closed_if_printing_a_step_fails(monkeypatch):
    ended = []

    def walk():
        try:
            yield FINE
        finally:
            ended.append(True)

    def breaks(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_steps, "line", breaks)
    with pytest.raises(KeyboardInterrupt):
        demo_steps.follow(walk(), ABOUT, Steps(Console(), None))
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
                "[red]Not from the expected tier: missed.[/] "
                r"missed: the connector: late \[again]."
            ),
        ),
    ],
)
def test_the_verdict_praises_or_names_what_failed(steps, words):
    assert demo_steps.verdict(steps, 3.2, "Well done.") == words


def test_logs_of_a_failed_step_are_kept_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    (folder / "node").mkdir(parents=True)
    (folder / "engine-a.log").write_text("engine")
    (folder / "node" / "node.log").write_text("node")
    (folder / "node" / "domain.key").write_text("secret")
    kept = demo_steps.keep_logs(folder)
    found = {str(file.relative_to(kept)) for file in kept.rglob("*") if file.is_file()}
    assert found == {"engine-a.log", "node/node.log"}
    assert kept.parent == tmp_path
