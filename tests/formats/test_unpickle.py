"""Pickles from foreign files: values come out, code stays in."""

import pickle

import numpy as np
import pytest
import torch

from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.formats.files import stand_in, unpickle


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    "value",
    [
        b"raw",
        b"",
        bytearray(),
        1j,
        frozenset({1, "a"}),
        {1, 2},
        bytearray(b"x"),
        torch.float8_e5m2,
        torch.device("cuda:1"),
        {"a": [1, (2,)]},
        torch.Size([1, 2]),
        np.float32(2.5),
        np.int64(-1),
        np.bool_(True),
        np.complex64(1j),
        2**100,
        float("inf"),
        None,
    ],
)
def test_values_are_read(value, protocol):
    found = unpickle(pickle.dumps(value, protocol), "x")
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print, 4),
        pickle.dumps(pytest.raises, 4),
        b"",
        b"\x80\x04",
        b"r\xff\xff\xff\x7f.",
        b"Nr\xff\xff\xff\x7f.",
        b"cos\nsystem\n.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
        b"(S'x'\nibuiltins\neval\n.",
        b"\x82\x01.",
        pickle.dumps(np.zeros(2), 4),
        pickle.dumps(np.array([None])[()], 4)[:-3],
    ],
)
def test_pickles_of_more_than_values_are_refused(data):
    with pytest.raises((CorruptError, LoadError), match="x: "):
        unpickle(data, "x")


def test_a_pickle_cannot_change_what_it_names():
    """BUILD sets attributes of the object before it; those of what a table gives cannot be set."""
    table = {"a.Kind": stand_in("a.Kind"), "numpy.dtype": np.dtype}
    for name in (b"a\nKind", b"numpy\ndtype"):
        for state in (b"}X\x04\x00\x00\x00kindK\x05s", b"N}X\x04\x00\x00\x00kindK\x05s\x86"):
            with pytest.raises(CorruptError):
                unpickle(b"\x80\x02c" + name + b"\n" + state + b"b.", "x", table)
    assert table["a.Kind"].kind == "a.Kind"
    made = unpickle(b"\x80\x02ca\nKind\nK\x05\x85RX\x01\x00\x00\x00sb.", "x", table)
    assert (made.args, made.state) == ((5,), "s")


def test_a_table_is_all_that_a_pickle_can_name():
    data = pickle.dumps(torch.nn.Linear, 2)
    with pytest.raises(LoadError, match=r"x: refers to torch\.nn\.modules\.linear\.Linear"):
        unpickle(data, "x")
    assert unpickle(data, "x", {"torch.nn.modules.linear.Linear": "it"}) == "it"


def test_a_pickle_above_the_limit_is_refused():
    with pytest.raises(CorruptError, match="expected at most 67,108,864"):
        unpickle(bytes((64 << 20) + 1), "x")


def test_what_is_shared_is_read():
    shared = tuple(range(100))
    value = {
        "groups": [{"betas": shared, "keys": {shared: 1}} for _ in range(50)],
        "nested": ((1, 2), shared),
    }
    assert unpickle(pickle.dumps(value, 4), "x") == value
