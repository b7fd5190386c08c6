"""Folders of torch.distributed.checkpoint, written by torch under real sharding, read without
running their pickles.
"""

import pickle
import shutil

import models
import pickles
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from buckets import in_bucket
from hypothesis import given, settings, strategies as st
from on_ranks import RANK, on_ranks
from safetensors.torch import load_file, save_file
from seeds import examples
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from wrappers import WRAPPERS

from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, LoadError
from ft_ckpt.extensions.foreign import dcp
from ft_ckpt.extensions.tools.converting import convert
from ft_ckpt.storage.places import open_place

CASES = ("fsdp2", "tensor_parallel")


@on_ranks(2)
def write_dcp(folder, wrapper):
    """`saved/` as torch writes it, and `truth.safetensors`."""
    live = WRAPPERS[wrapper](models.build("llama"))
    # Tensor parallelism needs one batch: unsharded tensors would differ between the ranks
    # otherwise.
    live.step(models.batch(seed=0 if wrapper == "tensor_parallel" else RANK))
    inner = live.model
    weights = get_model_state_dict(inner)
    state = {
        "model": weights,
        "optimizer": get_optimizer_state_dict(inner, live.optimizer),
        "step": 7,
    }
    torch_dcp.save(state, checkpoint_id=folder / "saved")
    whole = {
        f"model.{key}": one.full_tensor() if isinstance(one, DTensor) else one
        for key, one in weights.items()
    }
    write(whole, folder)


def write(tensors, folder):
    if RANK == 0:
        own = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, folder / "truth.safetensors")
    dist.barrier()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder for each wrapper, by two ranks."""
    folder = tmp_path_factory.mktemp("dcp")
    for wrapper in CASES:
        (folder / wrapper).mkdir()
        write_dcp(folder / wrapper, wrapper)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", [open_place, in_bucket])
def test_every_tensor_is_put_together(written, case, where):
    truth = load_file(written / case / "truth.safetensors")
    file = dcp.open_dcp(where(written / case / "saved"))
    assert {name for name in file.specs if name.startswith("model.")} == set(truth)
    assert any(len(boxes) > 1 for boxes in file.boxes.values()), "nothing was sharded"
    assert any("optimizer" in name for name in file.specs)
    assert "step: an object" in file.skipped
    for name, tensor in truth.items():
        assert torch.equal(file.read(name).view(tensor.shape), tensor), name


@pytest.mark.parametrize("case", CASES)
def test_any_slice_is_that_of_the_whole(written, case):
    file = dcp.open_dcp(open_place(written / case / "saved"))
    for name, spec in file.specs.items():
        whole = file.read(name)
        for start, stop in [
            (0, 1),
            (1, 5),
            (spec.shape[-1] - 1 if spec.shape else 0, whole.numel()),
            (7, 7),
            (30, 75),
        ]:
            stop = max(start, min(stop, whole.numel()))
            assert torch.equal(file.read(name, start, stop), whole[start:stop]), (name, start, stop)


TYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64")
}


@pytest.fixture
def plain(tmp_path):
    """A checkpoint of one process, with every kind of tensor."""
    state = {name: torch.arange(6).view(2, 3).to(dtype) for name, dtype in TYPES.items()}
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "é/x": torch.ones(2),
        "t": torch.randn(3, 4).t(),
    }
    torch_dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved", state


def test_every_type_and_shape(plain):
    folder, state = plain
    file = dcp.open_dcp(open_place(folder))
    assert {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in state.items()
    }
    for name, tensor in state.items():
        found = file.read(name).view(tensor.shape)
        assert (
            torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))
            if tensor.dim()
            else True
        ), name
    assert file.read("scalar").tolist() == [2.5]


def test_the_way_back_is_torch_s_own(plain, tmp_path):
    """From a checkpoint to a torch file, of which torch makes a checkpoint again."""
    folder, state = plain
    report = convert(folder, tmp_path / "x.pt", verify=True, map={"float32": "model.w"})
    assert report.tensors == len(state)
    torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "again")
    into = {
        "model.w": torch.zeros(2, 3),
        "bfloat16": torch.zeros(2, 3).bfloat16(),
        "scalar": torch.tensor(0.0),
    }
    torch_dcp.load(into, checkpoint_id=tmp_path / "again", no_dist=True)
    assert torch.equal(into["model.w"], state["float32"])
    assert torch.equal(into["bfloat16"], state["bfloat16"])
    assert into["scalar"] == 2.5


def test_writing_one_is_left_to_torch(plain, tmp_path):
    with pytest.raises(
        ConfigError, match=r"format='dcp': folders of .* are read only: .*torch_save_to_dcp"
    ):
        convert(plain[0], tmp_path / "again", format="dcp")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("way", sorted(pickles.malicious("")))
def test_metadata_are_not_run(plain, tmp_path, way):
    folder, _ = plain
    mark = tmp_path / "mark"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = pickles.malicious(mark)[way]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(LoadError, match=r"saved/\.metadata: refers to"):
        dcp.open_dcp(open_place(folder))
    assert not mark.exists()


def test_missing_files_are_named(plain):
    folder, _ = plain
    (data,) = folder.glob("*.distcp")
    data.rename(folder / "elsewhere")
    with pytest.raises(CorruptError, match=r"__0_0\.distcp is missing"):
        dcp.open_dcp(open_place(folder))


def test_parts_that_do_not_fill_their_tensor_are_refused(plain):
    folder, _ = plain
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["float32"].size = torch.Size([5, 3])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match=r"float32: its stored parts do not fill \[5, 3\]"):
        dcp.open_dcp(open_place(folder))


def test_a_place_outside_the_folder_is_refused(plain):
    folder, _ = plain
    (data,) = folder.glob("*.distcp")
    shutil.copy(data, folder.parent / "outside.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../outside.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="outside"):
        dcp.open_dcp(open_place(folder))


@pytest.mark.parametrize(
    "name", ["TensorStorageMetadata", "ChunkStorageMetadata", "offset", "fqn", "MetadataIndex"]
)
def test_a_flipped_letter_in_the_metadata_is_noticed(plain, tmp_path, name):
    folder, _ = plain
    data = (folder / ".metadata").read_bytes()
    assert name.encode() in data
    (folder / ".metadata").write_bytes(data.replace(name.encode(), name.encode()[:-1] + b"~"))
    with pytest.raises((CorruptError, LoadError), match="metadata"):
        convert(folder, tmp_path / "y.h5", progress=False)
    assert not (tmp_path / "y.h5").exists()


def test_two_tensors_do_not_share_a_place(plain):
    folder, _ = plain
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    infos = {index.fqn: info for index, info in metadata.storage_data.items()}
    infos["t"].offset, infos["t"].length = infos["float32"].offset, infos["float32"].length
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="float32, t: stored at the same location"):
        dcp.open_dcp(open_place(folder))


def test_a_flipped_bit_of_a_tensor_is_noticed(plain, tmp_path):
    folder, state = plain
    (data,) = folder.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(state["t"].t().contiguous().numpy().tobytes()) + 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp: data/0 is damaged"):
        convert(folder, tmp_path / "y.h5", progress=False)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_damaged_metadata_give_an_error_or_whole_tensors(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    torch_dcp.save({"a": torch.randn(3, 4), "n": 1}, checkpoint_id=folder, no_dist=True)
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # not up to its length, which differs from save to save
        at = data.draw(st.integers(0, 1 << 20))
        content[at % len(content)] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content)
    try:
        file = dcp.open_dcp(open_place(folder))
        for spec in file.specs.values():
            assert file.read(spec.name).nbytes == spec.size_bytes
    except CheckpointError:
        pass
