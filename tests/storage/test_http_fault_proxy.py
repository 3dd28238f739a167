"""The proxy that storage tests and benchmarks use does what it says, and counts it."""

from __future__ import annotations

import http.client
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.http_fault_proxy import FaultProxy, Faults, fault_proxy
from tests.helpers.wait import wait_until
from tests.helpers.web_stubs import S3Stub, running

BODY = random.Random(1).randbytes(300_000)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with running(S3Stub, {"b/a.tar": BODY}) as server, fault_proxy(server.url) as proxy:
        yield proxy


def get(proxy: FaultProxy, timeout_s: float = 500) -> tuple[bytes, str]:
    """Return the object and its ETag."""
    with urllib.request.urlopen(f"{proxy.endpoint}/b/a.tar", timeout=timeout_s) as answer:
        return answer.read(), answer.headers["ETag"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("mute", TimeoutError),
        ("stall", TimeoutError),
        ("reset", ConnectionResetError),
        ("truncate", http.client.IncompleteRead),
        ("busy", urllib.error.HTTPError),
    ],
)
def test_a_fault_breaks_an_answer_and_is_counted(proxy: FaultProxy, kind: str, error: Any) -> None:
    proxy.set(Faults(**{kind: 1.0}))
    with pytest.raises(error):
        get(proxy, timeout_s=0.2 if error is TimeoutError else 500)
    wait_until(lambda: proxy.counts().faults[kind] == 1)
    proxy.set(Faults())
    assert get(proxy)[0] == BODY
    assert proxy.counts().gets_by_suffix == {"tar": 2}


def test_one_bit_of_an_answer_or_its_etag_is_another(proxy: FaultProxy) -> None:
    _, etag = get(proxy)
    proxy.set(Faults(flip=1.0))
    changed, _ = get(proxy)
    assert (int.from_bytes(BODY, "big") ^ int.from_bytes(changed, "big")).bit_count() == 1
    proxy.set(Faults(wrong_etag=1.0))
    assert get(proxy)[1] != etag
