"""Durable requests are acknowledged by the node while they run and at their end, once a block."""

from collections import Counter

import pytest

from holdfast.client.durable_requests import AGAIN_S, IDLE_S, DurableRequests
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.wire.local.messages import Hinted, Sync

KEY = bytes(16)


class Node:
    """A client of a node that answers what the test says; None: nothing yet.

    `replies`: by number of the question, from 1; `reply`: to all others.
    """

    def __init__(self):
        self.asked, self.syncs, self.reply, self.replies = [], [], None, {}

    def send(self, message):
        assert isinstance(message, Sync)
        assert message.saving
        self.asked.append(len(message.keys) // 16)
        self.syncs.append(message)
        return len(self.asked)

    def poll(self, request_id):
        if request_id in self.replies:
            return self.replies[request_id]
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def forget(self, request_id):
        pass


@pytest.fixture
def node():
    return Node()


@pytest.fixture
def requests():
    return DurableRequests()


def counted(requests, now_s):
    counts = Counter()
    for outcome, blocks in requests.poll(now_s):
        counts[outcome] += blocks
    return +counts


def test_saved_blocks_are_acknowledged_while_the_request_runs(requests, node):
    requests.saved("r", [node], 3, {0: (KEY * 3,)})
    assert counted(requests, 1.0) == {}
    assert node.asked == [3]
    node.reply = Hinted(3)
    assert counted(requests, 1.1) == {"kept": 3}
    assert requests.kept("r") == 3


def test_new_blocks_are_asked_about_after_a_while_and_at_the_end_at_once(requests, node):
    node.reply = Hinted(1)
    requests.saved("r", [node], 1, {0: (KEY,)})
    counted(requests, 1.0)
    assert counted(requests, 1.0) == {"kept": 1}
    requests.saved("r", [node], 2, {0: (KEY * 2,)})
    counted(requests, 1.1)
    assert node.asked == [1]
    node.reply = Hinted(2)
    counted(requests, 1.0 + AGAIN_S)
    assert counted(requests, 1.0 + AGAIN_S) == {"kept": 1}
    assert node.asked == [1, 2]
    requests.saved("r", [node], 3, {0: (KEY * 3,)})
    requests.ended("r", 1.6)
    node.reply = Hinted(3)
    counted(requests, 1.6)
    assert node.asked == [1, 2, 3]
    assert counted(requests, 1.6) == {"kept": 1}
    assert requests.blocks("r") == 0, "it is over"


def test_of_several_ranks_the_one_with_the_fewest_blocks_counts(requests, node):
    other = Node()
    node.reply, other.reply = Hinted(3), Hinted(2)
    requests.saved("r", [node, other], 3, {0: (KEY * 3, KEY * 3)})
    counted(requests, 1.0)
    assert counted(requests, 1.0) == {"kept": 2}


def test_several_groups_are_acknowledged_if_each_keeps_what_a_resume_needs(requests, node):
    requests.saved("r", [node], 3, {0: (KEY * 3,), 2: (KEY,)})
    counted(requests, 1.0)
    assert [(sync.group, len(sync.keys) // 16) for sync in node.syncs] == [(0, 3), (2, 1)]
    node.replies = {1: Hinted(3)}
    assert counted(requests, 1.0) == {}
    node.replies[2] = Hinted(1)
    assert counted(requests, 1.0) == {"kept": 3}


@pytest.mark.parametrize(("full", "window"), [(2, 1), (3, 0)])
def test_a_group_that_does_not_keep_all_of_it_acknowledges_nothing(requests, node, full, window):
    """A resume after fewer blocks needs others of the window, which were not asked about."""
    requests.saved("r", [node], 3, {0: (KEY * 3,), 1: (KEY,)})
    counted(requests, 1.0)
    node.replies = {1: Hinted(full), 2: Hinted(window)}
    requests.ended("r", 1.0)
    assert counted(requests, 1.0) == {"late": 3}


def test_blocks_that_are_not_acknowledged_at_the_end_are_late(requests, node):
    node.reply = Hinted(1)
    requests.saved("r", [node], 3, {0: (KEY * 3,)})
    requests.ended("r", 1.0)
    assert counted(requests, 1.0) == {}
    assert counted(requests, 1.0) == {"kept": 1, "late": 2}
    assert counted(requests, 1.0) == {}


@pytest.mark.parametrize("error", [NodeGoneError("gone"), RefusedError("no tier can flush")])
def test_a_node_that_cannot_acknowledge_makes_blocks_late(requests, node, error, caplog):
    requests.saved("r", [node], 3, {0: (KEY * 3,)})
    counted(requests, 1.0)
    requests.ended("r", 1.0)
    node.reply = error
    assert counted(requests, 1.0) == {"late": 3}
    assert ("no tier can flush" in caplog.text) == isinstance(error, RefusedError)


def test_an_idle_engine_asks_only_for_a_while(requests, node):
    requests.saved("r", [node], 1, {0: (KEY,)})
    assert not requests.is_awaited(1.0)
    requests.ended("r", 1.0)
    assert requests.is_awaited(1.0)
    assert not requests.is_awaited(1.0 + IDLE_S)


def test_a_request_that_is_forgotten_counts_nothing(requests, node):
    requests.saved("r", [node], 1, {0: (KEY,)})
    counted(requests, 1.0)
    requests.forget("r")
    node.reply = Hinted(1)
    assert counted(requests, 1.0) == {}
    requests.forget("r")
