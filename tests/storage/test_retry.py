"""How long a request is sent again: by the time since anything came from the store."""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys

import pytest

from mmstream.errors import ConfigError, StorageError
from mmstream.storage import RemoteStore, RequestError, open_store
from mmstream.storage.retry import health_of, retry

URL = "s3://bucket/prefix"
A_FAULT = ConnectionResetError(104, "reset")


class Server:
    """Fails as long as the clock of `pauses` is between `gone` and `back`."""

    def __init__(self, pauses, gone=0.0, back=1e9, error=A_FAULT):
        self.pauses, self.gone, self.back, self.error = pauses, gone, back, error
        self.num_requests = 0

    def __call__(self):
        self.num_requests += 1
        if self.gone <= sum(self.pauses) < self.back:
            raise self.error
        return "answer"


def test_a_store_that_answered_has_five_minutes_to_come_back(pauses):
    health_of(URL).answered()
    assert retry(URL, Server(pauses, back=290)) == "answer"
    assert 290 <= sum(pauses) <= 300
    assert max(pauses) <= 10
    assert len(pauses) > 29


def test_after_five_minutes_it_is_an_error_that_says_how_long_how_often_and_why(pauses):
    health_of(URL).answered()
    server = Server(pauses)
    pattern = rf"^{URL}/a: failed (\d+) times in 300\.\d s .*, last ConnectionResetError: .*reset"
    with pytest.raises(StorageError, match=pattern) as caught:
        retry(f"{URL}/a", server)
    assert f"failed {server.num_requests} times" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sum(pauses) == pytest.approx(300, abs=1)


def test_calls_one_after_the_other_do_not_add_up(pauses):
    health_of(URL).answered()
    with pytest.raises(StorageError):
        retry(f"{URL}/a", Server(pauses))
    second = Server(pauses)
    with pytest.raises(StorageError, match="failed once in 300"):
        retry(f"{URL}/b", second)
    assert second.num_requests == 1
    assert retry(f"{URL}/b", lambda: "answer") == "answer"
    with pytest.raises(StorageError, match="in 300"):  # the clock started over
        retry(f"{URL}/a", Server(pauses))


def test_a_call_inside_a_call_does_not_add_up(pauses):
    health_of(URL).answered()
    with pytest.raises(StorageError, match=f"{URL}/inner: failed"):
        retry(f"{URL}/outer", lambda: retry(f"{URL}/inner", Server(pauses)))
    assert sum(pauses) == pytest.approx(300, abs=1)


def test_a_request_that_alone_fails_has_the_same_limit(pauses):
    def fail():
        health_of(URL).answered()  # by other requests
        raise A_FAULT

    with pytest.raises(StorageError, match="in 300"):
        retry(f"{URL}/a", fail)


def test_a_fault_long_after_the_last_one_has_all_its_time(pauses):
    health_of(URL).answered()
    with pytest.raises(StorageError):
        retry(URL, Server(pauses))
    pauses.append(3600)
    assert retry(URL, Server(pauses, back=sum(pauses) + 250)) == "answer"


def test_other_buckets_and_endpoints_have_clocks_of_their_own(pauses, monkeypatch):
    health_of(URL).answered()
    assert health_of("s3://bucket/other").has_answered
    assert not health_of("s3://other/prefix").has_answered
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert not health_of(URL).has_answered


def test_an_absent_object_is_an_answer(pauses):
    with pytest.raises(FileNotFoundError):
        retry(URL, Server(pauses, error=FileNotFoundError("no such key")))
    assert health_of(URL).has_answered


@pytest.mark.parametrize("error", [TypeError, ImportError, AttributeError, MemoryError])
def test_a_bug_is_not_tried_again(pauses, error):
    with pytest.raises(error):
        retry(URL, Server(pauses, error=error("a bug")))
    assert pauses == []


def test_a_copy_of_a_store_has_the_health_of_the_first(pauses):
    store = open_store(URL)
    health_of(URL).answered()
    pickled = pickle.dumps(store)
    health_of(URL).has_answered = False
    assert pickle.loads(pickled) == RemoteStore(URL)
    assert health_of(URL).has_answered


@pytest.mark.parametrize(("seconds", "pause"), [(6, 6), (100, 20 / 3), (math.inf, 20 / 3)])
def test_a_server_may_say_how_long_to_wait(pauses, monkeypatch, seconds, pause):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "20")
    health_of(URL).answered()
    error = RequestError("slow down", retry_after_s=seconds)
    assert retry(URL, Server(pauses, back=1e-9, error=error)) == "answer"
    assert pauses == [pytest.approx(pause, abs=0.5)]


def test_a_warning_comes_after_five_seconds_and_then_every_thirty(pauses, caplog):
    health_of(URL).answered()
    with caplog.at_level(logging.WARNING):
        retry(f"{URL}/a", Server(pauses, back=1))
        assert caplog.messages == []
        retry(f"{URL}/a", Server(pauses, back=200))
    assert 4 <= len(caplog.messages) <= 7
    for message in caplog.messages:
        assert message.startswith(f"{URL}/a: fails since ")
        assert "ConnectionResetError: [Errno 104] reset; it is tried again until " in message


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_the_callers_mistake(pauses, monkeypatch, text):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", text)
    with pytest.raises(ConfigError, match=r"MMSTREAM_STORAGE_PATIENCE_S=.*: a number of seconds"):
        retry(URL, Server(pauses))
    with pytest.raises(ConfigError, match=r"MMSTREAM_STORAGE_PATIENCE_S=.*: a number of seconds"):
        open_store(URL)


def test_a_long_request_that_breaks_once_is_sent_again(pauses):
    health_of(URL).answered()

    def upload():
        if not pauses:
            pauses.append(400)  # seconds of one request
            raise A_FAULT
        return "answer"

    assert retry(f"{URL}/a", upload) == "answer"


def test_a_patience_of_any_length_is_taken_and_none_is_one_attempt(pauses, monkeypatch, caplog):
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "1e300")
    health_of(URL).answered()
    assert retry(URL, Server(pauses, back=1000)) == "answer"
    assert "it is tried again until " in caplog.text
    monkeypatch.setenv("MMSTREAM_STORAGE_PATIENCE_S", "0")  # one attempt
    with pytest.raises(StorageError, match=r"failed once in 0\.0 s"):
        retry(URL, Server(pauses))


def test_a_program_that_ends_does_not_wait_for_a_store():
    script = """
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from mmstream.storage.retry import health_of, retry

has_failed = Event()

def fail():
    has_failed.set()
    raise ConnectionResetError("reset")

health_of("s3://bucket").answered()
ThreadPoolExecutor().submit(retry, "s3://bucket", fail)
has_failed.wait()
"""
    environment = os.environ | {"MMSTREAM_STORAGE_PATIENCE_S": "1e9"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
