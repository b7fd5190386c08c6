"""Pickles from foreign files: values come out, code stays in."""

import os
import pickle

import numpy as np
import pytest
import torch

from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.formats import torch_pickle
from ft_ckpt.formats.cerebras_read import _LEGACY_TREE
from ft_ckpt.formats.unpickle import loads


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    "value",
    [b"raw", b"", bytearray(), 1j, frozenset({1, "a"}), {1, 2}, bytearray(b"x"), torch.float8_e5m2,
     torch.device("cuda:1"), {"a": [1, (2,)]}, torch.Size([1, 2]), np.float32(2.5), np.int64(-1), np.bool_(True),
     np.complex64(1j), 2**100, float("inf"), None],
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
        b"\x80\x04cbuiltins\nbytes\nK\xff\x85R.", b"\x80\x02X\x01\x00\x00\x00aQ.",
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
    with pytest.raises(CorruptError, match="may not change"):
        loads(b"\x80\x02ctorch.utils._pytree\nTreeSpec\nN}X\x04\x00\x00\x00typeNs\x86b.", _LEGACY_TREE)
    assert _LEGACY_TREE["torch.utils._pytree.TreeSpec"]()["type"] is None


def test_each_reader_has_a_table_of_its_own():
    """What stands for a type in torch's files is no value, and the leaves of other files may not name an object."""
    for value in (torch.float16, np.float32(1), torch.nn.Linear):
        data = pickle.dumps(value, 2)
        assert torch_pickle.loads(data, "file") is not value
    with pytest.raises(CorruptError, match=r"names torch\.nn\.modules\.linear\.Linear"):
        loads(data)
    with pytest.raises(LoadError, match=r"posix\.getcwd"):
        torch_pickle.loads(pickle.dumps(os.getcwd, 2), "file")
