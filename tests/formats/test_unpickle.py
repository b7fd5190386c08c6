"""Pickles from foreign files: values come out, code stays in."""

import os
import pickle

import numpy as np
import pytest
import torch

from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.formats import torch_file
from ft_ckpt.formats.cerebras import _LEGACY_TREE
from ft_ckpt.formats.pickles import unpickle_plain


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize(
    "value",
    [b"raw", b"", bytearray(), 1j, frozenset({1, "a"}), {1, 2}, bytearray(b"x"), torch.float8_e5m2,
     torch.device("cuda:1"), {"a": [1, (2,)]}, torch.Size([1, 2]), np.float32(2.5), np.int64(-1), np.bool_(True),
     np.complex64(1j), 2**100, float("inf"), None],
)  # fmt: skip
def test_values_are_read(value, protocol):
    found = unpickle_plain(pickle.dumps(value, protocol))
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
        unpickle_plain(data)


def test_a_pickle_cannot_change_what_it_calls():
    """BUILD sets attributes of the object before it; those of our stand-ins cannot be set."""
    data = b"\x80\x02cnumpy.core.multiarray\nscalar\n}X\x04\x00\x00\x00makeK\x05sb."
    with pytest.raises(CorruptError):
        unpickle_plain(data)
    with pytest.raises(CorruptError):
        unpickle_plain(data.replace(b"}X", b"N}X").replace(b"sb.", b"s\x86b."))
    assert unpickle_plain(pickle.dumps(np.float32(1), 4)) == 1
    with pytest.raises(CorruptError, match="may not change"):
        unpickle_plain(b"\x80\x02ctorch.utils._pytree\nTreeSpec\nN}X\x04\x00\x00\x00typeNs\x86b.", _LEGACY_TREE)
    assert _LEGACY_TREE["torch.utils._pytree.TreeSpec"]()["type"] is None


def test_each_reader_has_a_table_of_its_own():
    """What stands for a type in torch's files is no value, and the leaves of other files may not name an object."""
    for value in (torch.float16, np.float32(1), torch.nn.Linear):
        data = pickle.dumps(value, 2)
        assert torch_file.load_torch_pickle(data, "file") is not value
    with pytest.raises(CorruptError, match=r"names torch\.nn\.modules\.linear\.Linear"):
        unpickle_plain(data)
    with pytest.raises(LoadError, match=r"posix\.getcwd"):
        torch_file.load_torch_pickle(pickle.dumps(os.getcwd, 2), "file")


def _nested(first, step, times=40):
    """A pickle of something that holds what came before twice, so many times."""
    data = b"\x80\x04" + first + b"q\x00"
    for number in range(times):
        data += step(b"h" + bytes([number])) + b"q" + bytes([number + 1])
    return data


LISTS = _nested(b"](K\x01e", lambda before: b"](" + before * 2 + b"e")
EMPTY = _nested(b"]", lambda before: b"](" + before * 2 + b"e")
TUPLES = _nested(b"K\x01\x85", lambda before: before * 2 + b"\x86")
LONG = b"\x80\x04](" + b"K\x01" * 50_000 + b"eq\x00"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "data",
    {
        "empty lists": EMPTY + b".",
        "lists": LISTS + b".", "tuples": TUPLES + b".", "a key": b"\x80\x04}" + TUPLES[2:] + b"K\x01s.",
        "keys": b"\x80\x04}(" + TUPLES[2:] + b"K\x01u.", "a set": b"\x80\x04\x8f(" + TUPLES[2:] + b"\x90.",
        "a frozen set": b"\x80\x04(" + TUPLES[2:] + b"\x91.",
        "an argument": TUPLES + b"0ccollections\nOrderedDict\nh\x28\x85\x85R.",
        "copies": LONG + b"".join(b"cbuiltins\nset\nh\x00\x85R" for _ in range(9000)) + b".",
        "deep": b"\x80\x04" + b"](" * 20_000 + b"e" * 20_000 + b".",
        "a deep key": b"\x80\x04}K\x01" + b"\x85" * 1_000_000 + b"K\x01s.",
    }.items(), ids=lambda item: item[0],
)  # fmt: skip
def test_a_few_bytes_cannot_ask_for_much(data):
    """Each would take hours, or all memory."""
    for read in (unpickle_plain, lambda data: torch_file.load_torch_pickle(data, "file")):
        with pytest.raises(CorruptError):
            read(data[1])


def test_what_is_shared_in_moderation_is_read():
    shared = tuple(range(100))
    value = {
        "groups": [{"betas": shared, "keys": {shared: 1}} for _ in range(50)],
        "nested": (((1, 2), shared), shared),
    }
    assert unpickle_plain(pickle.dumps(value, 4)) == value
