"""What S3 refuses is said in the same words by everything that asks it, and at once if it is final.

It also says how often a request is sent again. What only the client of the reader process has is in
test_s3_client.py.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import ssl
import time
import traceback
from email.utils import formatdate

import pytest

from mmstream.errors import ConfigError, StorageError
from mmstream.storage import open_store, remote
from mmstream.storage.range_client import range_client
from mmstream.storage.retry import _health, retry
from mmstream.storage.store import RequestError
from tests.helpers.aws import SECRET, TOKEN
from tests.helpers.stub_server import refused, reply
from tests.helpers.web_stubs import S3Stub, running

DATA = bytes(range(256)) * 4
URL = "s3://bucket/corpus"
SECRETS = SECRET, TOKEN

CALLS = {
    "read": lambda store: store.read("a", 10_000),
    "range": lambda store: store.read_range("a", 0, 9),
    "stat": lambda store: store.stat("a"),
    "list": lambda store: store.list(),
    "write": lambda store: store.write("b", DATA),
}


def read_by_the_reader(store, name, start, stop):
    async def read():
        client = range_client(store)
        try:
            stream = await client.open(name, start, stop)
            return b"".join([piece async for piece in stream])
        finally:
            await client.close()

    return asyncio.run(read())


CALLS["reader"] = lambda store: read_by_the_reader(store, "a", 0, 9)
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
KINDS = ("range", "write", "reader")
every_kind = pytest.mark.parametrize("call", [CALLS[kind] for kind in KINDS], ids=KINDS)
"""Many requests at once, whose errors are values; a single one; one of the reader process."""


@pytest.fixture(autouse=True)
def settings(keyless, tmp_path, pauses, caplog):
    """Keys and a token in a file. They are in no log and no error. Pauses take no time."""
    keyless.setenv("AWS_REGION", "us-east-1")
    write_keys(tmp_path, "KEY")
    caplog.set_level(logging.DEBUG, logger="mmstream")
    yield keyless
    assert not [secret for secret in SECRETS if secret in caplog.text]


def write_keys(folder, access_key):
    secret, token = SECRETS
    (folder / "credentials").write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret}\n"
        f"aws_session_token = {token}\n"
    )


@pytest.fixture
def server(settings):
    """A server with one object, which the environment leads to."""
    with running(S3Stub, {"bucket/corpus/a": DATA}) as server:
        settings.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def refuse(server, answer):
    """Have every request refused."""
    server.refuse = lambda _: answer
    server.requests.clear()


@pytest.mark.slow
@every_call
def test_a_refused_key_is_final_and_says_what_the_server_said(server, call, pauses):
    refuse(server, refused("403 Forbidden", "AccessDenied", "not\nyours"))
    with pytest.raises(StorageError, match=f"^{URL}.*: 403 .*; check the credentials") as caught:
        call(open_store(URL))
    assert pauses == []
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 2  # the second one with credentials read again
    shown = "".join(traceback.format_exception(caught.value)) + repr(pickle.dumps(open_store(URL)))
    assert not [secret for secret in SECRETS if secret in shown]


@every_kind
def test_a_refused_access_names_the_right_that_may_be_missing(server, call):
    refuse(server, refused("403 Forbidden", "AccessDenied", "not yours"))
    rights = {"range": "s3:ListBucket, S3 answers so", "write": r"write there \(s3:PutObject\)$"}
    with pytest.raises(StorageError, match=rights["write" if call is CALLS["write"] else "range"]):
        call(open_store(URL))


@pytest.mark.slow
@every_kind
def test_keys_that_were_renewed_in_their_file_are_taken(server, call, pauses, tmp_path):
    store, expired = open_store(URL), refused("400 Bad Request", "ExpiredToken", "too old")
    server.refuse = lambda request: None if request.access_key == "KEY" else expired
    CALLS["stat"](store)
    server.refuse = lambda request: None if request.access_key == "NEW" else expired
    write_keys(tmp_path, "NEW")
    call(store)
    assert pauses == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "num_pauses"),
    [
        ([refused("400 Bad Request", "ExpiredToken")] * 9, 4),  # two in a try: with keys read again
        ([reply("501 Not Implemented", b"<html>")], 1),
        ([refused("503 Slow Down", "SlowDown")] * 2, 2),
    ],
    ids=["expired token", "501", "slow down"],
)
def test_a_store_that_has_answered_may_refuse_for_a_while(server, pauses, answers, num_pauses):
    store, left = open_store(URL), list(answers)
    CALLS["stat"](store)
    server.refuse = lambda _: left.pop() if left else None
    assert CALLS["read"](store) == DATA
    assert len(pauses) == num_pauses


@every_kind
@pytest.mark.parametrize("status", ["501 Not Implemented", "405 Method Not Allowed"])
def test_a_server_that_is_no_s3_is_an_error_at_once(server, call, pauses, status):
    refuse(server, reply(status, b"<html>"))
    with pytest.raises(StorageError, match=f"^{URL}.*: {status}; is AWS_ENDPOINT_URL the addr"):
        call(open_store(URL))
    assert pauses == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["read", "range", "list", "write", "reader"])
def test_plain_http_to_a_server_of_tls_is_not_taken_for_wrong_credentials(server, kind):
    text = b"Client sent an HTTP request to an HTTPS server.\n"  # as Go's servers say it
    refuse(server, reply("400 Bad Request", text))
    with pytest.raises(StorageError, match=r" 400[^;]*; if this server speaks TLS, write https"):
        retry(URL, lambda: CALLS[kind](open_store(URL)))


@every_kind
def test_a_wrong_clock_is_final_and_told_in_seconds(server, call, pauses):
    date = formatdate(time.time() - 4000, usegmt=True)
    refuse(server, refused("403 Forbidden", "RequestTimeTooSkewed", Date=date))
    with pytest.raises(
        StorageError, match=r"clock of this machine is 4,\d\d\d s ahead of the serv"
    ):
        call(open_store(URL))
    assert pauses == []


@pytest.mark.slow
@every_kind
def test_a_bucket_elsewhere_is_followed_or_the_setting_is_named(server, call, pauses):
    there = refused("301 Moved", "PermanentRedirect", x_amz_bucket_region="eu-west-3")
    server.refuse = lambda request: (
        None if "eu-west-3" in request.headers["Authorization"] else there
    )
    call(open_store(URL))
    remote._client_of.cache_clear()
    _health.cache_clear()  # else it may be a load balancer's fault, for a while
    # botocore asks for the region by HEAD, which a redirect of all would make it do for ever.
    nowhere, denied = refused("301 Moved", "PermanentRedirect"), refused("403 Forbidden", "")
    server.refuse = lambda request: denied if request.command == "HEAD" else nowhere
    with pytest.raises(StorageError, match="set AWS_REGION"):
        call(open_store(URL))
    assert pauses == []


def test_redirects_of_botocore_that_never_end_name_the_setting(server, settings, pauses):
    settings.setattr(remote, "_read_ranges", lambda *_: [RecursionError()])
    with pytest.raises(StorageError, match=r"another region.* set AWS_REGION"):
        open_store(URL).read_range("a", 0, 9)
    assert pauses == []


def test_a_server_that_asks_to_wait_has_its_will(server, pauses):
    answers = [refused("503 Slow Down", "SlowDown", Retry_After="7")] * 2
    server.refuse = lambda _: answers.pop() if answers else None
    assert CALLS["range"](open_store(URL)) == DATA[:9]
    assert [round(pause) for pause in pauses] == [7, 7]


def test_what_knows_no_ranges_is_refused(server, pauses):
    server.answer_object = lambda request, name: request.answer(200, DATA)
    store = open_store(URL)
    assert store.read("a") == DATA  # it has answered, and is not waited for nevertheless
    with pytest.raises(StorageError, match=f"{URL}/a: failed 5 times.*does not know ranges"):
        store.read_range("a", 3, 5)
    assert len(pauses) == 4


@every_kind
def test_a_server_without_tls_is_an_error_at_once(server, settings, call, pauses):
    settings.setenv("AWS_ENDPOINT_URL", server.url.replace("http:", "https:"))
    with pytest.raises(StorageError, match=r"does not speak TLS .*write http:// in AWS_ENDPOINT"):
        call(open_store(URL))
    assert pauses == []


@every_kind
def test_an_unknown_certificate_is_an_error_at_once(certificate, settings, call, pauses):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with running(S3Stub, {"bucket/corpus/a": DATA}, tls=tls) as server:
        settings.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(StorageError, match="self-signed certificate; AWS_CA_BUNDLE names a fi"):
            call(open_store(URL))
        assert pauses == []
        settings.setenv("AWS_CA_BUNDLE", str(certificate))
        call(open_store(URL))


def test_an_endpoint_of_another_scheme_is_a_setting(settings):
    settings.setenv("AWS_ENDPOINT_URL", "ftp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        open_store(URL).read("a")


@every_call
def test_an_endpoint_without_a_scheme_is_a_setting(settings, call, pauses):
    settings.setenv("AWS_ENDPOINT_URL", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"endpoint: 127.0.0.1:1; write http:// or https:// bef"):
        call(open_store(URL))
    assert pauses == []


@every_kind
@pytest.mark.parametrize("host", ["127.0.0.1:1", "host.invalid"])
def test_an_address_where_nothing_answers_is_named_after_growing_pauses(
    settings, call, pauses, host
):
    settings.setenv("AWS_ENDPOINT_URL", f"http://{host}")
    with pytest.raises(StorageError, match=r"failed 5 times.*; check AWS_ENDPOINT_URL$"):
        retry(URL, lambda: call(open_store(URL)))
    assert len(pauses) == 4
    assert all(0.25 * 2**i <= pause <= 0.5 * 2**i for i, pause in enumerate(pauses))


@pytest.mark.slow
@every_call
def test_passing_faults_are_tried_again(server, call, pauses):
    store = open_store(URL)
    expected = call(store)
    for num_failures in (1, 4):
        server.requests.clear()
        pauses.clear()
        server.statuses_to_come[:] = [500] * num_failures
        assert retry(URL, lambda: call(store)) == expected
        assert len(server.requests) == num_failures + 1 == len(pauses) + 1


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        ("400 Bad Request", "InvalidRequest", ""),
        ("400 Bad Request", "KMS.DisabledException", ""),
        ("403 Forbidden", "InvalidObjectState", "the object lies in an archive: restore it"),
    ],
)
def test_a_refusal_that_stays_is_an_error_after_five_tries(server, pauses, status, code, hint):
    store = open_store(URL)
    CALLS["stat"](store)
    refuse(server, refused(status, code))
    with pytest.raises(StorageError, match=f"failed 5 times.*{code}.*{hint}"):
        store.read_range("a", 0, 9)
    assert len(pauses) == 4
    with pytest.raises(RequestError, match=code) as caught:
        CALLS["reader"](store)
    assert caught.value.may_be_final


@pytest.mark.slow
def test_s3_that_is_too_busy_for_a_start_is_waited_for(server, pauses):
    refuse(server, refused("503 Slow Down", "SlowDown"))
    with pytest.raises(StorageError, match=r"failed \d+ times in 300\.\d s .* 503 SlowDown"):
        open_store(URL).read_range("a", 0, 1000)
    assert len(server.requests) == len(pauses) + 1 > 30  # each has 10 seconds at most


def test_only_the_ranges_that_failed_or_came_short_are_asked_for_again(server, settings, pauses):
    read_ranges, asked = remote._read_ranges, []

    def read_badly(client, urls, bounds):
        responses = read_ranges(client, urls, bounds)
        asked.append([start for start, _ in bounds])
        if len(asked) == 1:
            responses[1] = ConnectionResetError("reset")
            responses[2] = responses[2]._replace(data=responses[2].data[:3])
        if len(asked) == 2:
            responses[0] = TimeoutError("slow")
        return responses

    settings.setattr(remote, "_read_ranges", read_badly)
    wanted = [("a", start, start + 9) for start in (0, 10, 20, 30)]
    assert open_store(URL).read_ranges(wanted) == [DATA[start:stop] for _, start, stop in wanted]
    assert asked == [[0, 10, 20, 30], [10, 20], [10]]
    assert len(pauses) == 2


@pytest.mark.parametrize("path", ["/", "/sub/path/"])
def test_an_endpoint_may_have_a_path(server, settings, path):
    settings.setenv("AWS_ENDPOINT_URL", server.url + path)
    server.objects[f"{path.strip('/')}/bucket/corpus/a".lstrip("/")] = DATA
    assert open_store(URL).read("a", 10_000) == DATA


@pytest.mark.parametrize(
    ("prefix", "name"), [("s3://bucket", "/a"), ("s3://bucket//p", "a"), ("s3://bucket/p", "x//y")]
)
def test_every_request_has_the_same_key_where_slashes_meet(server, prefix, name):
    store = open_store(prefix)
    store.write(name, b"data")
    assert store.stat(name).size == 4
    assert store.read_range(name, 0, 4) == read_by_the_reader(store, name, 0, 4) == b"data"
    paths = {request.split(" ")[1].partition("?")[0] for request in server.requests}
    assert paths == {f"/{prefix.removeprefix('s3://')}/{name}"}
