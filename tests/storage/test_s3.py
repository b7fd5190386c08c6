"""What becomes of a request that fails, on the scripted server: tried again, refused by name, and
never half done.
"""

import os

import pytest
from contract_store import put
from http_server import Fault
from s3_server import BUCKET, FAST

from ft_ckpt.errors import ConfigError, CorruptError, NameTakenError, TargetError, UnreadableError
from ft_ckpt.storage.places import open_place

MANY = 99
CALLS = {
    "read": lambda store: store.read("there"),
    "range": lambda store: store.read("there", 10, 500),
    "list": lambda store: store.list(),
    "list_folder": lambda store: store.list_folder(),
    "stat": lambda store: store.stat("there"),
    "write": lambda store: store.write("small", b"small"),
    "copy": lambda store: store.copy("there", "copied"),
    "delete": lambda store: store.delete(["doomed"]),
    "upload": lambda store: put(store, "large", b"large" * 100),
}
WRITES = ("write", "delete", "upload")  # a copy looks first what there is to copy


@pytest.fixture
def store(s3):
    for name in ("there", "doomed"):
        s3.put(f"run/{name}", b"x" * 1000)
    return open_place(f"s3://{BUCKET}/run", **FAST).folder


@pytest.mark.sample(12)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "code": "SlowDown", "headers": {"Retry-After": "1"}},
        {"status": 500},
        {"status": 500, "acts_first": True},
        {"cuts": "before"},
        {"cuts": "after"},
    ],
    ids=str,
)
def test_a_request_that_fails_once_is_tried_again(s3, store, call, fault):
    begun = s3.request_count
    for at in (1, 2):
        s3.faults = [Fault(at=s3.request_count + at, **fault)]
        CALLS[call](store)
    assert s3.request_count - begun >= 3  # the first one is repeated


@pytest.mark.parametrize("call", [call for call in CALLS if call != "upload"])
def test_an_answer_that_is_cut_off_is_asked_for_again(s3, store, call):
    s3.faults = [Fault(cuts="during")]
    expected = CALLS[call](store)
    assert CALLS[call](store) == expected


@pytest.mark.sample(12)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"status": 503, "code": "SlowDown"}, "503 Service Unavailable"),
        ({"status": 403, "code": "ExpiredToken"}, "403 Forbidden"),
        ({"status": 409, "code": "OperationAborted"}, "409 Conflict"),
        ({"status": 301, "code": "PermanentRedirect"}, "region"),
        ({"cuts": "before"}, "HTTP error"),
    ],
    ids=str,
)
def test_what_goes_on_failing_is_an_error_of_ours(s3, store, call, fault, said):
    s3.faults = [Fault(times=MANY, **fault)]
    with pytest.raises(
        TargetError if call in WRITES else (UnreadableError, CorruptError)
    ) as caught:
        CALLS[call](store)
    assert not isinstance(caught.value, NameTakenError)
    assert str(caught.value).startswith(f"s3://{BUCKET}/run")
    assert said in str(caught.value)
    assert call in WRITES or ("use credentials" in str(caught.value)) == (
        fault.get("status") == 403
    )
    assert "<" not in str(caught.value)


@pytest.mark.parametrize("call", ["range", "list", "list_folder", "delete", "upload"])
def test_answers_of_a_wrong_length_are_errors(s3, store, call):
    """Not of what is read whole, in one request: of that the digests tell."""
    s3.faults = [Fault(times=MANY, keeps_bytes=1, shortens_length=True)]
    with pytest.raises((TargetError, UnreadableError, CorruptError)):
        CALLS[call](store)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "stat"])
def test_a_bucket_that_is_not_there_is_said(s3, call):
    if call in ("range", "copy"):  # which ask for a head first, whose answer has no body
        s3.put("run/there", b"x" * 1000)
        s3.faults = [Fault("GET|PUT", status=404, code="NoSuchBucket")]
    else:
        del s3.buckets[BUCKET]
    with pytest.raises(ConfigError, match="no such bucket; create it"):
        CALLS[call](open_place(f"s3://{BUCKET}/run", **FAST).folder)


def test_a_create_that_another_one_stopped_is_made_again(s3, store):
    """409 says neither that the name is taken nor that it is free."""
    s3.faults = [Fault("PUT", status=409, code="ConditionalRequestConflict", times=2)]
    store.write("lock", b"mine", create_only=True)
    assert s3.content("run/lock") == b"mine"
    s3.faults = [Fault("PUT", status=409, code="ConditionalRequestConflict", times=MANY)]
    with pytest.raises(TargetError, match="409") as caught:
        store.write("other", b"mine", create_only=True)
    assert not isinstance(caught.value, NameTakenError)
    with pytest.raises(NameTakenError):
        store.write("lock", b"mine", create_only=True)


def test_a_lost_answer_to_a_create_looks_like_a_lost_race(s3, store):
    """So whoever has to know who won reads back what is there."""
    s3.faults = [Fault("PUT", cuts="after")]
    with pytest.raises(NameTakenError):
        store.write("lock", b"mine", create_only=True)
    assert store.read("lock") == b"mine"


def test_versions_are_compared_where_conditions_are_ignored(s3, store):
    s3.ignores_conditions = True
    s3.put("run/there", b"x" * 300_000)
    file = store.open("there")
    s3.put("run/there", b"y" * 300_000)
    with pytest.raises(UnreadableError, match="overwritten while it was read"):
        file.read_into(memoryview(bytearray(10)), 290_000)


def test_an_upload_to_a_store_that_does_not_say_what_it_made(s3, store):
    s3.hides_versions = True
    put(store, "large", b"large")
    assert store.read("large") == b"large"


def test_pages_of_a_listing_and_deletions_of_more_than_a_thousand(s3, store):
    s3.listed_at_once = 500
    for number in range(1200):
        s3.put(f"run/many/checkpoint-{number}/a", b"x")
    names = [each.name for each in store.list("many")]
    assert len(names) == len(set(names)) == 1200
    assert len(store.list_folder("many").folders) == 1200
    s3.requests.clear()
    store.delete(names)
    assert store.list("many") == []
    assert len(s3.requests_like("POST .*delete")) == 2


def test_settings_of_the_client_come_from_the_caller_from_variables_and_from_us(monkeypatch):
    from ft_ckpt.extensions.buckets.client_options import client_options

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    ours = client_options("s3://bucket")
    assert ours["unsigned_payload"], "the line is encrypted"
    assert ours["client_options"] == {"timeout": "3m"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_TIMEOUT", "1m")
    found = client_options(
        "s3://bucket", client_options={"timeout": "5s"}, retry_config={"max_retries": 1}
    )
    assert "unsigned_payload" not in found
    assert found["client_options"] == {"timeout": "5s", "allow_http": "true"}
    assert found["retry_config"] == {**ours["retry_config"], "max_retries": 1}
    assert client_options("gs://bucket")["client_options"] == {"timeout": "3m"}


@pytest.mark.parametrize("fault", [{"cuts": "after"}, {"status": 500, "acts_first": True}], ids=str)
def test_the_end_of_an_upload_whose_answer_is_lost_is_an_error(s3, store, fault):
    """Asked again, a store knows nothing of an upload that is over; whether it was this one cannot
    be told.
    """
    s3.faults = [Fault("POST .*uploadId", **fault)]
    with pytest.raises(TargetError, match="404 Not Found, NoSuchUpload"):
        put(store, "large", b"large")
    put(store, "large", b"large")
    assert s3.content("run/large") == b"large"


def test_what_another_process_put_there_is_not_taken_for_the_upload(s3, store):
    s3.faults = [Fault("POST .*uploadId", then=lambda: s3.put("run/large", b"other"))]
    with pytest.raises(CorruptError, match="run/large: differs from what was uploaded"):
        put(store, "large", b"large")


@pytest.mark.sample("500")
@pytest.mark.parametrize("status", [500, 403])
def test_an_upload_that_fails_is_taken_back(s3, store, status):
    """A part that cannot be sent ends it, and an end that cannot be made, too: nothing is left to
    pay for.
    """
    for request in ("PUT .*partNumber=2", "POST .*uploadId"):
        s3.faults = [Fault(request, status=status, times=MANY)]
        with pytest.raises(TargetError, match=f"{status}"):
            put(store, "large", bytes(40 << 20))
        assert s3.uploads == {}
    assert "run/large" not in s3.names()
    s3.faults.clear()
    put(store, "large", bytes(40 << 20))
    assert len(s3.content("run/large")) == 40 << 20
