"""What was timed is told behind the tokens, in order, whether or not a node is there to hear it."""

import threading
from types import SimpleNamespace

from holdfast.client.timing_reporter import TimingReporter
from holdfast.wire.local.messages import Done, Observed

REPORTS = [Observed([(200.0, 0.0, seconds)], []) for seconds in (0.1, 0.2, 0.3)]


def test_reports_are_sent_in_order_without_waiting_for_answers(fakes):
    client = fakes.Client(lambda _: Done())
    reporter = TimingReporter([fakes.Link(client)], delay_s=0.0)
    for report in REPORTS:
        reporter.put(report)
    reporter.close()
    assert client.sent == client.forgotten == REPORTS


def test_put_does_not_wait_until_the_report_is_sent(fakes):
    go = threading.Event()

    class Held(fakes.Link):
        def client(self):
            assert go.wait(60)
            return super().client()

    client = fakes.Client(lambda _: Done())
    reporter = TimingReporter([Held(client)], delay_s=0.0)
    reporter.put(REPORTS[0])
    assert client.sent == []
    go.set()
    reporter.close()
    assert client.sent == REPORTS[:1]


def test_a_report_skips_unreachable_nodes_and_reaches_the_others(fakes):
    gone, client = fakes.Client(), fakes.Client(lambda _: Done())
    gone.gone = True
    reporter = TimingReporter([fakes.Link(gone), fakes.Link(None), fakes.Link(client)], delay_s=0.0)
    reporter.put(REPORTS[0])
    reporter.put(REPORTS[1])
    reporter.close()
    assert (gone.sent, client.sent) == ([], REPORTS[:2])


def test_a_prompt_is_counted_by_the_first_reachable_node(fakes):
    gone, first, second = (fakes.Client(lambda _: Done()) for _ in range(3))
    gone.gone = True
    links = [fakes.Link(None), *map(fakes.Link, (gone, first, second))]
    reporter = TimingReporter(links, delay_s=0.0)
    report = Observed([], prompts=[(300, 0, {})])
    reporter.put(report)
    reporter.close()
    assert (first.sent, second.sent) == ([report], [Observed([])])


def test_an_error_at_one_node_does_not_stop_reports_to_other_nodes(fakes, caplog):
    class Broken(fakes.Link):
        def client(self):
            raise RuntimeError("out of threads, say")

    client = fakes.Client(lambda _: Done())
    reporter = TimingReporter([Broken(None), fakes.Link(client)], delay_s=0.0)
    for report in REPORTS:
        reporter.put(report)
    reporter.close()
    assert client.sent == REPORTS
    assert caplog.text.count("cannot be sent") == 1, "of several reports with one error"


def test_reports_queued_during_a_delay_are_sent_after_it(fakes, monkeypatch):
    delays, queued = [], threading.Event()

    def sleep(delay_s):
        delays.append(delay_s)
        assert queued.wait(60)

    monkeypatch.setattr("holdfast.client.timing_reporter.time", SimpleNamespace(sleep=sleep))
    client = fakes.Client(lambda _: Done())
    reporter = TimingReporter([fakes.Link(client)], delay_s=0.2)
    for report in REPORTS * 100:
        reporter.put(report)
    queued.set()
    reporter.close()
    assert client.sent == REPORTS * 100
    assert len(delays) <= 2  # the second is that of `close`
