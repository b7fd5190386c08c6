"""What a file of torch or of safetensors would not give back is refused by its place, before it
replaces anything.
"""

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch

from ft_ckpt.errors import ConfigError, SelectionError
from ft_ckpt.extensions.tools import load, save

Point = namedtuple("Point", "x y")


def test_torch_files_are_refused_what_torch_would_not_read_back(tmp_path):
    """torch writes all of it, and reads none of it without running code."""
    carrying = torch.ones(2)
    carrying.hook = np.float64
    loop = {"a": []}
    loop["a"].append(loop)
    obj = {
        "rng": np.ones(3),
        "step": np.int64(3),
        "lr": np.float64(0.5),
        "point": Point(1, 2),
        "seen": [frozenset([1])],
        "queue": deque([1]),
        "default": defaultdict(list),
        "odd": OrderedDict(a=range(3)),
        "carrying": carrying,
        "codes": torch.empty_quantized(
            [2], torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        ),
    }
    save({"kept": 1}, tmp_path / "x.pt")
    for key, value in [*obj.items(), ("keys", {frozenset([1]): 2}), ("loop", loop)]:
        with pytest.raises(SelectionError, match=rf'state\["{key}"\]'):
            save({key: value}, tmp_path / "x.pt")
    for value in (b"", 10**700, [torch.ones(2, dtype=torch.complex64), loop]):
        with pytest.raises(SelectionError, match="state"):
            save({"a": value}, tmp_path / "x.pt")
    whole = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(SelectionError, match="HDF5"):  # one memory as two types
        save([whole, whole.real], tmp_path / "x.pt")
    assert load(tmp_path / "x.pt") == {"kept": 1}


def test_what_a_torch_file_takes_comes_back(tmp_path):
    state = OrderedDict(a=torch.ones(2), b=torch.eye(3)[1:])
    state._metadata = {"": {"version": 1}}
    shared = [1, 2]
    obj = {
        "state": state,
        1: [True, None, 2.5, 3j, "\ud800", b"x", bytearray(b"y")],
        (1, "a"): {1, (2, 3)},
        "count": Counter("aab"),
        "types": [torch.float8_e5m2, torch.device("cuda:1")],
        "shared": [shared, shared],
    }
    save(obj, tmp_path / "x.pt")
    back = load(tmp_path / "x.pt")
    assert repr(back) == repr(obj)
    assert type(back["state"]) is OrderedDict
    assert back["state"]._metadata == state._metadata


@pytest.mark.parametrize("name", ["x.safetensors", "x.dual"])
@pytest.mark.parametrize("tensor", ["__metadata__", "__hdf5__.rotary_emb.inv_freq.position_ids"])
def test_names_that_safetensors_keeps_for_itself_are_refused(tensor, name, tmp_path):
    with pytest.raises(SelectionError, match=tensor):
        save({tensor: torch.ones(2), "b": torch.ones(3)}, tmp_path / name, name[2:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "container", [lambda it: {"a": it}, lambda it: Counter(a=it), lambda it: OrderedDict(a=[it])]
)
def test_tensors_not_yet_read_are_written_to_a_torch_file(container, tmp_path):
    save({"w": torch.arange(5000.0)}, tmp_path / "x.h5")
    save(container(load(tmp_path / "x.h5")["w"]), tmp_path / "x.pt")
    assert repr(torch.load(tmp_path / "x.pt", weights_only=True)) == repr(
        container(torch.arange(5000.0))
    )


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_here_is_no_damage_of_the_file(device, suffix, tmp_path):
    save({"w": torch.ones(2)}, tmp_path / f"x{suffix}")
    with pytest.raises(ConfigError, match=f"map_location='{device}'"):
        load(tmp_path / f"x{suffix}", device)
