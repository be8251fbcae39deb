"""Text of other programs is one printable line, whatever it contains."""

import pytest

from holdfast.errors import HoldfastError, MembershipError, printable
from holdfast.membership.http_json import HttpStatusError
from holdfast.membership.member_list import read_members

HOSTILE = [
    "\x1b[2J\x1b]0;title\x07",  # clears the terminal, sets its title
    "\x9b31mred",  # CSI in one character
    "line\nWARNING all is well",
    "back\rspace\b\b",
    "\u202egnihtyna",  # right to left
    "\u2028line",
    "\x00\x7f",
    "\udc80\ud800",  # lone surrogates
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_foreign_text_is_one_printable_line(text):
    kept = printable(f"before {text} after")
    assert kept.isprintable()
    assert kept.isascii()
    assert kept.startswith("before ")
    assert kept.endswith(" after")
    assert printable(kept) == kept


def test_foreign_text_is_cut():
    assert printable("x" * 1_000) == "x" * 300
    assert printable("ö 東 \U0001f512") == "ö 東 \U0001f512"


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_an_error_is_one_printable_line(text):
    for error in (HoldfastError(text), HttpStatusError(text, 403)):
        assert str(error).isprintable()
    with pytest.raises(MembershipError) as caught:
        read_members({"members": [{"id": "a", text: 1}]}, f"etcd {text}")
    assert str(caught.value).isprintable()
