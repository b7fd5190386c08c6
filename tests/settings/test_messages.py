"""Text for terminals and logs: control characters are escaped and secrets removed, in errors,
warnings and records.
"""

import linecache
import logging
import pickle
import warnings
from pathlib import Path

import pytest

from ft_ckpt.errors import CorruptError, NoSpaceError, UnreadableError, damaged_input
from ft_ckpt.messages import (
    LOG,
    did_you_mean,
    expected_one_of,
    printable,
    short_repr,
    warn,
    without_secrets,
)

HOSTILE = "a\x1b]0;title\x07\r\nb\x9b31m\u202e\u2028\x7f\udcff"
SAFE = r"a\x1b]0;title\x07\r\nb\x9b31m\u202e\u2028\x7f\udcff"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("s3://KEY:SE/CR+ET=@bucket: no", "s3://***@bucket: no"),
        ("s3:/KEY:SECRET@bucket", "s3:/***@bucket"),  # as a Path has it
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("hf://user:TOKEN@user/name@main", "hf://***@user/name@main"),
        ("mounted from //user:SECRET@host/share", "mounted from //***@host/share"),
        ("(https://h/p?X-Amz-Credential=A%2FB&X-Amz-Date=1&X-Amz-Signature=c)", None),
        (
            "with url: /b/k?sv=1&sig=SECRET (Caused by x)",
            "with url: /b/k?sv=1&sig=*** (Caused by x)",
        ),
        ("https://h/p?a=1&amp;access_token=SECRET'", "https://h/p?a=1&amp;access_token=***'"),
        ("gs://b/p?token=SECRET: no such object", "gs://b/p?token=***: no such object"),
        (
            "?next=https%3A%2F%2Fh%3Fsig%3DSECRET%26b%3D2",
            "?next=https%3A%2F%2Fh%3Fsig%3D***%26b%3D2",
        ),
        (f"token hf_{'aB3' * 12}, no", "token hf_***, no"),
        (
            "headers {'Authorization': 'Bearer S3.E-C_RET', 'x': 1}",
            "headers {'Authorization': 'Bearer ***', 'x': 1}",
        ),
    ],
)
def test_secrets_of_urls(text, shown):
    hidden = without_secrets(text)
    assert hidden == (
        shown or "(https://h/p?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***)"
    )
    assert printable(printable(text)) == printable(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        *(
            "s3://bucket/a@b/c",
            "hf://user/name@main/x",
            "http://localhost:9000/a@b",
            "http://[::1]:9000/a@b",
        ),
        *(
            "abfss://container@account/x",
            "/tmp//12:30@home",
            "loss=3; token=None",
            "somebody@example.org",
            "é 漢 a/b=c",
            "a bearer authentication",
            "hf_org/hf_model",
        ),
    ],
)
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    "wrapped",
    [str, lambda text: [text], lambda text: {text: {"a": text}}, str.encode, Path],
    ids=["", "[]", "{}", "bytes", "object"],
)
def test_secrets_are_removed_before_values_are_cut_short(wrapped):
    for text in (
        f"{'a' * 30} https://u:S3CRET@h/p",
        f"https://h/{'a' * 30}?token={'b' * 30}S3CRET",
    ):
        assert "S3CRET" not in printable(short_repr(wrapped(text)))
        assert "..." in short_repr(wrapped(text))


def test_an_object_that_cannot_say_what_it_is_is_named():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no words")

    assert "Broken" in short_repr([Broken()])


def test_long_text_takes_no_long_time():
    """Each took minutes where a repetition had no bound."""
    for text in (
        "?" + "key" * 100_000,
        "//a:b" * 50_000 + "@",
        "://a:" + "b" * 300_000,
        "a" * 300_000 + "=",
    ):
        assert len(printable(text)) >= 5


def test_errors_are_printable_in_all_that_they_say():
    error = CorruptError(f"{HOSTILE}: https://u:SECRET@h/?token=SECRET", 3)
    assert error.args == (f"{SAFE}: https://***@h/?token=***", 3)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    full = NoSpaceError(HOSTILE)
    assert (str(full), full.strerror) == (SAFE, SAFE)
    assert str(UnreadableError(HOSTILE)) == SAFE


def test_what_a_library_raised_is_printable_where_a_traceback_shows_it():
    library_error = ValueError(f"{HOSTILE}\nhttps://h?sig=SECRET")
    library_error.__cause__ = KeyError("https://u:SECRET@h")
    with pytest.raises(CorruptError) as caught, damaged_input("file"):
        raise library_error
    error = caught.value
    while error is not None:
        assert "SECRET" not in f"{error} {error!r}"
        assert "\x1b" not in str(error)
        error = error.__cause__


def test_warnings_and_records_are_printable(caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(f"{HOSTILE} s3://K:SECRET@b")
    assert str(caught[0].message) == f"{SAFE} s3://***@b"
    assert caught[0].filename == __file__
    assert "warn(f" in linecache.getline(__file__, caught[0].lineno)
    with caplog.at_level(logging.DEBUG, "ft_ckpt"):
        LOG.debug("%s of %d: s3://K:SECRET@b 100%%", HOSTILE, 2)
    assert caplog.messages == [f"{SAFE} of 2: s3://***@b 100%"]


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (["eval_los"], "did you mean eval_loss?"),
        (["eval_los", "acuracy", "eval_losss"], "did you mean eval_loss, accuracy?"),
        (["grad_norm"], ""),
        ([], ""),
    ],
)
def test_the_nearest_names_are_suggested_once_each(words, question):
    assert did_you_mean(words, ["accuracy", "eval_loss", "loss"]) == question


def test_what_was_expected_comes_before_the_nearest_name():
    assert expected_one_of("safetensor", ["safetensors", "h5"]) == (
        "expected one of safetensors, h5; did you mean safetensors?"
    )
    assert expected_one_of("tiny", ["safetensors", "h5"]) == "expected one of safetensors, h5"
