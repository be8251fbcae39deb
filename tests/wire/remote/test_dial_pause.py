"""Pauses before a target that has no connection free is dialled again."""

from holdfast.clock import ManualClock
from holdfast.wire.remote.dial_pause import FIRST_S, LONGEST_S, DialPause


def test_one_attempt_is_made_after_each_pause_and_pauses_grow_to_a_limit() -> None:
    clock = ManualClock(1.0)
    pause = DialPause(clock.now)
    assert pause.may_dial()
    assert pause.may_dial(), "several at once, as long as none was turned away"
    pauses = []
    for _ in range(12):
        pause.turned_away()
        assert pause.is_turned_away
        assert not pause.may_dial()
        pauses.append(pause.left_s())
        clock.advance(pause.left_s())
        assert pause.may_dial()
        assert not pause.may_dial(), "a second caller waits for the next pause"
    assert pauses[0] >= FIRST_S
    assert pauses[:6] == sorted(pauses[:6])
    assert all(LONGEST_S <= pause_s <= 1.25 * LONGEST_S for pause_s in pauses[6:])


def test_an_attempt_that_is_not_turned_away_ends_the_pauses() -> None:
    clock = ManualClock(1.0)
    pause = DialPause(clock.now)
    for _ in range(5):
        pause.turned_away()
        clock.advance(pause.left_s())
    pause.end()
    assert not pause.is_turned_away
    assert pause.may_dial()
    pause.turned_away()
    assert pause.left_s() <= 1.25 * FIRST_S
