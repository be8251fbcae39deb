"""One request is timed, compared bit for bit, and its tokens are traced to where they came from."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.harness import completion as asking
from holdfast_bench.harness.completion import CompletionAnswer, ask, complete, wait_asking

PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {0}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_cache_hit"}} {1}
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {2}
vllm:prompt_tokens_by_source_created{{engine="0",source="local_compute"}} 1.7e+09
vllm:prompt_tokens_cached_by_source_total{{engine="0",source="device"}} {1}
vllm:prompt_tokens_cached_by_source_total{{engine="0",source="host"}} {3}
vllm:prompt_tokens_cached_by_source_total{{engine="0",source="disk"}} {4}
"""


def event(token, logprobs):
    top = {f"token_id:{token}": logprobs}
    choice = {"token_ids": [token], "logprobs": {"top_logprobs": [top]}}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


class Fake:
    """An engine that streams what it is told to and counts as vLLM does."""

    def __init__(self):
        self.name = "the fake"
        self.status = 200
        self.events = [event(7, -0.25), event(9, -1.5), b"data: [DONE]\n\n"]
        self.counts = [0.0, 0.0, 0.0, 0.0, 0.0]
        self.grows = [1024.0, 0.0, 0.0, 0.0, 0.0]
        self.asked = []
        self.process = SimpleNamespace(log="fake.log", tail=lambda: "the last words")

    def metrics(self):
        return PAGE.format(*self.counts)


@pytest.fixture
def fake():
    engine = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            engine.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(engine.status)
            self.end_headers()
            for data in engine.events:
                self.wfile.write(data)
            pairs = zip(engine.counts, engine.grows, strict=True)
            engine.counts = [count + grown for count, grown in pairs]

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield engine
        server.shutdown()
        thread.join()


def test_a_request_carries_a_hint_only_if_one_is_given(fake):
    complete(fake, [1], 2, {"bypass": True})
    complete(fake, [1], 2)
    hinted, plain = fake.asked
    assert hinted.pop("kv_transfer_params") == {"holdfast": {"bypass": True}}
    assert hinted == plain


def test_tokens_and_logprobs_are_collected_in_order(fake):
    answer = complete(fake, [1, 2, 3], 2)
    assert answer.tokens == (7, 9)
    assert answer.logprobs == ((("token_id:7", -0.25),), (("token_id:9", -1.5),))
    assert answer.ttft_s > 0


def test_the_request_is_greedy_and_of_fixed_length(fake):
    complete(fake, [1, 2, 3], 2)
    [sent] = fake.asked
    assert sent["prompt"] == [1, 2, 3]
    assert sent["max_tokens"] == 2
    assert sent["temperature"] == 0
    assert sent["ignore_eos"] is True


@pytest.mark.parametrize(
    ("grows", "computed", "local", "fetched"),
    [
        ([1024, 0, 0, 0, 0], 1024, 0, {}),
        ([24, 1000, 0, 0, 0], 24, 1000, {}),
        ([24, 0, 1000, 1000, 0], 24, 0, {"host": 1000}),
        ([24, 0, 1000, 300, 700], 24, 0, {"host": 300, "disk": 700}),
        ([24, 0, 1000, 0, 0], 24, 0, {"unknown": 1000}),
        ([1024, 0, 0, 1000, 0], 1024, 0, {}),
    ],
)
def test_prompt_tokens_are_traced_to_their_source(fake, grows, computed, local, fetched):
    fake.counts = [5000.0, 400.0, 30.0, 20.0, 10.0]
    fake.grows = [float(grown) for grown in grows]
    tokens = ask(fake, [0] * 1024, 2).tokens
    assert (tokens.computed, tokens.local, tokens.fetched) == (computed, local, fetched)
    assert tokens.fetched_total == sum(fetched.values())


def test_a_token_count_changed_by_other_requests_is_an_error(fake, monkeypatch):
    monkeypatch.setattr("holdfast_bench.harness.completion.METRICS_TIMEOUT_S", 0.1)
    with pytest.raises(HoldfastError, match="accounts for 1024 prompt tokens of 3"):
        ask(fake, [1, 2, 3], 2)


def test_the_error_for_a_refused_request_has_the_message_of_the_engine(fake):
    fake.status, fake.events = 400, [b"prompt too long"]
    with pytest.raises(
        HoldfastError, match="the fake refused a request: HTTP 400: prompt too long"
    ):
        complete(fake, [1], 2)


def test_an_error_in_the_stream_is_an_error(fake):
    fake.events = [event(7, -0.5), b'data: {"error": {"message": "load failed"}}\n\n']
    with pytest.raises(HoldfastError, match="load failed"):
        complete(fake, [1], 2)


def test_a_stream_that_breaks_off_is_an_error(fake):
    fake.events = fake.events[:1]
    with pytest.raises(HoldfastError, match="gave 1 of 2 tokens"):
        complete(fake, [1], 2)


def test_a_dead_engine_is_an_error_with_the_end_of_its_log(fake):
    from holdfast.probe import free_port

    fake.port = free_port()
    with pytest.raises(HoldfastError, match=r"broke off a request: (.|\n)*the last words"):
        complete(fake, [1], 2)


def test_answers_are_equal_only_bit_for_bit():
    answer = CompletionAnswer((7,), ((("token_id:7", -0.25),),), 0.1)
    assert answer.equals(msgspec.structs.replace(answer, ttft_s=5.0))
    assert not answer.equals(msgspec.structs.replace(answer, tokens=(8,)))
    nearly = ((("token_id:7", -0.25000001),),)
    assert not answer.equals(msgspec.structs.replace(answer, logprobs=nearly))


def test_wait_asking_repeats_the_request_until_the_node_plans_for_it(monkeypatch):
    plans = iter([4, 4, 4, 5])  # the first request came while the node was away
    asked = []
    engine = SimpleNamespace(
        process=SimpleNamespace(check=lambda: None, name="it"),
        reset_prefix_cache=lambda: asked.append("forget"),
    )
    monkeypatch.setattr(asking, "ask", lambda *_: asked.append("ask"))
    wait_asking(engine, lambda: next(plans), [1, 2, 3])
    assert asked == ["forget", "ask"] * 2
