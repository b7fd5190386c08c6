"""Pickles from foreign files: values come out, code stays in."""

import pickle

import numpy as np
import pytest
import torch

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.unpickle import loads


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    "value",
    [b"raw", 1j, frozenset({1, "a"}), {1, 2}, bytearray(b"x"), torch.float8_e5m2, torch.device("cuda:1"),
     {"a": [1, (2,)]}, torch.Size([1, 2]), np.float32(2.5), np.int64(-1), np.bool_(True), np.complex64(1j),
     2**100, float("inf"), None],
)  # fmt: skip
def test_values_are_read(value, protocol):
    found = loads(pickle.dumps(value, protocol))
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print, 4), pickle.dumps(pytest.raises, 4), b"", b"\x80\x04", b"r\xff\xff\xff\x7f.",
        b"cos\nsystem\n.", b"\x80\x04cbuiltins\nbytearray\nK\xff\x85R.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.", b"(S'x'\nibuiltins\neval\n.", b"\x82\x01.",
        pickle.dumps(np.zeros(2), 4), pickle.dumps(np.array([None])[()], 4)[:-3],
    ],
)  # fmt: skip
def test_pickles_of_more_than_values_are_refused(data):
    with pytest.raises(CorruptError):
        loads(data)


def test_a_pickle_cannot_change_what_it_calls():
    """BUILD sets attributes of the object before it; those of our stand-ins cannot be set."""
    data = b"\x80\x02cnumpy.core.multiarray\nscalar\n}X\x04\x00\x00\x00makeK\x05sb."
    with pytest.raises(CorruptError):
        loads(data)
    with pytest.raises(CorruptError):
        loads(data.replace(b"}X", b"N}X").replace(b"sb.", b"s\x86b."))
    assert loads(pickle.dumps(np.float32(1), 4)) == 1
