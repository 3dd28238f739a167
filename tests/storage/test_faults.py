"""Storage that fails: what is tried again, how often, and what is said at once."""

from __future__ import annotations

import pytest

from mmstream.dataset.index_tars import index_tars
from mmstream.dataset.open import open_dataset
from mmstream.errors import StorageError
from mmstream.storage import open_store, retry
from mmstream.storage import remote as storage
from tests.helpers.stub_server import refused, reply
from tests.helpers.web_stubs import S3Stub, running

DATA = bytes(range(256)) * 4


CALLS = [
    pytest.param(lambda store: store.read("a"), id="read"),
    pytest.param(lambda store: store.read_range("a", 0, 1), id="read_range"),
    pytest.param(lambda store: store.size("a"), id="size"),
    pytest.param(lambda store: store.exists("a"), id="exists"),
    pytest.param(lambda store: store.list(), id="list"),
    pytest.param(lambda store: store.write("a", DATA), id="write"),
    pytest.param(lambda store: store.remove("a"), id="remove"),
]


@pytest.fixture
def nowhere(aws, pauses):
    """A store on a port where nobody listens."""
    aws.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return open_store("s3://bucket/prefix")


@pytest.mark.parametrize("call", CALLS)
def test_an_unreachable_endpoint_fails_after_growing_pauses(nowhere, pauses, call):
    with pytest.raises(StorageError, match=r"failed 5 times.*127\.0\.0\.1:1"):
        call(nowhere)
    assert len(pauses) == retry.MAX_FIRST_ATTEMPTS - 1
    assert all(0.25 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(pauses))


@pytest.fixture
def troubled(nowhere, monkeypatch):
    """A store, and its server."""
    with running(S3Stub, {}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield nowhere, server


def test_a_server_in_trouble_is_asked_five_times_and_not_more(troubled, pauses):
    store, server = troubled

    def cut_off(request):
        request.close_connection = True
        return reply("206 Partial", bytes(1000))[:-100]

    server.refuse = cut_off
    with pytest.raises(StorageError, match="failed 5 times"):
        store.read_range("a", 0, 1000)
    assert server.requests == ["GET /bucket/prefix/a"] * retry.MAX_FIRST_ATTEMPTS
    assert len(pauses) == retry.MAX_FIRST_ATTEMPTS - 1


@pytest.mark.slow
def test_s3_that_is_too_busy_for_a_start_is_waited_for(troubled, pauses):
    store, server = troubled
    server.refuse = lambda _: refused("503 Slow Down", "SlowDown")
    with pytest.raises(StorageError, match=r"failed \d+ times in 300\.\d s .* 503 SlowDown"):
        store.read_range("a", 0, 1000)
    assert len(server.requests) == len(pauses) + 1 > 30  # each has 10 seconds at most


@pytest.mark.slow
@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_named(s3):
    store = open_store("s3://no-such-bucket/x")
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/x/a: no such bucket"):
        store.write("a", DATA)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        store.read("a")
    for call in (open_dataset, index_tars):
        with pytest.raises(FileNotFoundError, match="no-such-bucket/x: no such bucket"):
            call(store.url)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_passing_faults_are_tried_again(troubled, pauses, call):
    store, server = troubled
    server.objects["bucket/prefix/a"] = DATA
    expected = call(store)
    for num_failures in (1, 4):
        server.objects["bucket/prefix/a"] = DATA
        server.requests.clear()
        pauses.clear()
        server.statuses_to_come[:] = [500] * num_failures
        assert call(store) == expected
        assert len(server.requests) == num_failures + 1
        assert len(pauses) == num_failures


@pytest.mark.parametrize("error", [TypeError, ImportError, AttributeError, MemoryError])
def test_a_bug_is_not_tried_again(monkeypatch, pauses, error):
    def call(url):
        raise error("a bug")

    monkeypatch.setattr(storage, "_client", call)
    with pytest.raises(error):
        open_store("s3://bucket/x").read("a")
    assert pauses == []


@pytest.mark.s3
def test_only_the_ranges_that_failed_or_came_short_are_asked_for_again(s3, monkeypatch, pauses):
    store = open_store(f"{s3}/ranges")
    store.write("a", DATA)
    read_ranges, asked = storage._read_ranges, []

    def read_badly(client, urls, bounds):
        responses = read_ranges(client, urls, bounds)
        asked.append([start for start, _ in bounds])
        if len(asked) == 1:
            responses[1] = ConnectionResetError("reset")
            responses[2] = responses[2]._replace(data=responses[2].data[:3])
        if len(asked) == 2:
            responses[0] = TimeoutError("slow")
        return responses

    monkeypatch.setattr(storage, "_read_ranges", read_badly)
    wanted = [("a", start, start + 9) for start in (0, 10, 20, 30)]
    assert store.read_ranges(wanted) == [DATA[start:stop] for _, start, stop in wanted]
    assert asked == [[0, 10, 20, 30], [10, 20], [10]]
    assert len(pauses) == 2
