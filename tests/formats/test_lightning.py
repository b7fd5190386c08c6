"""Checkpoints of Lightning: their weights by name, everything else said, and nothing of them
run.
"""

import contextlib

import library_files
import pickles
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from buckets import in_bucket
from library_files import numbered

import ft_ckpt
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError
from ft_ckpt.extensions.foreign.lightning import SkippedValue
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.places import open_place

GOLDEN = library_files.FOLDER / "lightning.ckpt"
WEIGHTS = {
    "model.0.weight": numbered(8, 2, 3),
    "model.0.bias": numbered(9, 2),
    "model.1.weight": numbered(2, 2),
    "model.1.bias": numbered(3, 2),
    "model.1.running_mean": numbered(4, 2),
    "model.1.running_var": numbered(5, 2),
    "model.1.num_batches_tracked": torch.tensor(600),
    "half.weight": numbered(7, 1, 2, dtype=torch.bfloat16),
}


def check_weights(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def lightning_like(path, settings, weights=None):
    torch.save(
        {
            "epoch": 1,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": weights or {"w": torch.ones(2)},
            "hyper_parameters": settings,
        },
        path,
    )
    return path


@pytest.mark.parametrize("where", [open_place, in_bucket])
def test_its_tensors_are_the_weights(where):
    file = open_source(open_place(where(GOLDEN)))
    check_weights(
        {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}, WEIGHTS
    )
    assert file.ties == {"tied.weight": "model.0.weight", "tied.bias": "model.0.bias"}


def test_what_is_left_out_is_said_by_name(tmp_path):
    report = ft_ckpt.convert(GOLDEN, tmp_path / "x.pt", progress=False)
    assert {
        "hyper_parameters.config: __main__.Config",
        "hyper_parameters.where: pathlib.PosixPath",
    } < {*report.skipped}
    assert "optimizer_states: 4 tensors and 14 values" in report.skipped


def test_convert_strips_the_prefix_of_the_module(tmp_path):
    ft_ckpt.convert(
        GOLDEN, tmp_path / "x.safetensors", map={"model.*": "*"}, verify=True, progress=False
    )
    found = ft_ckpt.load(tmp_path / "x.safetensors", "cpu")
    assert torch.equal(found["0.weight"], WEIGHTS["model.0.weight"])
    assert {"0.weight", "1.running_var", "half.weight"} < set(found)


@pytest.mark.parametrize(
    "options", [{}, {"map_location": "cpu"}, {"mapped": False}, {"verify": True}]
)
def test_load_gives_all_of_it_and_names_what_it_did_not_make(options):
    found = ft_ckpt.load(GOLDEN, **options)
    tied = {name: WEIGHTS[name.replace("tied", "model.0")] for name in ("tied.weight", "tied.bias")}
    check_weights(found["state_dict"], WEIGHTS | tied)
    assert found["state_dict"]["tied.weight"] is found["state_dict"]["model.0.weight"]
    assert (found["epoch"], found["global_step"], found["hparams_name"]) == (1, 2, "kwargs")
    assert found["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.5
    settings = found["hyper_parameters"]
    assert settings["rate"] == 0.1
    assert settings["config"] == SkippedValue("hyper_parameters.config", "__main__.Config")
    assert settings["act"] == SkippedValue("hyper_parameters.act", "builtins.getattr")


def test_values_come_as_they_are(tmp_path):
    settings = {
        "dtype": torch.bfloat16,
        "size": torch.Size([2]),
        "device": torch.device("cpu"),
        "odd": ({1}, 1j, None),
    }
    found = ft_ckpt.load(lightning_like(tmp_path / "x.ckpt", settings))["hyper_parameters"]
    assert found == settings
    assert type(found["size"]) is torch.Size


def tensors_at(path):
    return open_source(open_place(path))


class Settings:
    """An object of a class of the user's."""


def test_settings_that_contain_themselves_beside_an_object_are_refused(tmp_path):
    """They were admitted, and a conversion never ended."""
    loop = {"rate": 0.1, "of": Settings()}
    loop["self"] = loop
    path = lightning_like(tmp_path / "x.ckpt", loop)
    for call in (ft_ckpt.load, tensors_at):
        with pytest.raises(CheckpointError, match=r"x\.ckpt"):
            call(path)


@pytest.mark.parametrize("name", sorted(pickles.malicious(library_files.FOLDER)))
def test_nothing_in_its_settings_runs(tmp_path, name):
    mark = tmp_path / "mark"
    path = lightning_like(tmp_path / "x.ckpt", pickles.malicious(mark)[name])
    # torch refuses the modules os and sys, whatever takes their place
    if name in ("system", "nested"):
        for read in (tensors_at, ft_ckpt.load):
            with pytest.raises(LoadError, match=r"x\.ckpt: .*posix"):
                read(path)
    else:
        assert set(open_source(open_place(path)).specs) == {"w"}
        assert "SkippedValue" in repr(ft_ckpt.load(path))
    assert not mark.exists()


@pytest.mark.parametrize("name", sorted(pickles.TAMPER))
def test_nothing_in_its_settings_changes_the_reader(tmp_path, name):
    whole = lightning_like(tmp_path / "x.ckpt", {}).read_bytes()
    (tmp_path / "y.ckpt").write_bytes(
        pickles.archive(pickles.TAMPER[name] + b"pytorch-lightning_version")
    )
    with contextlib.suppress(CheckpointError):
        open_source(open_place(tmp_path / "y.ckpt"))
    assert (tmp_path / "x.ckpt").read_bytes() == whole
    assert ft_ckpt.load(GOLDEN)["hyper_parameters"]["rate"] == 0.1


def test_unknown_classes_among_the_weights_are_refused(tmp_path):
    path = lightning_like(
        tmp_path / "x.ckpt", {}, {"w": torch.ones(2), "q": {"packed": pickles.Call(print, "x")}}
    )
    for read in (tensors_at, ft_ckpt.load):
        with pytest.raises(LoadError, match=r"builtins\.print"):
            read(path)
    path = lightning_like(tmp_path / "y.ckpt", {}, {"w": torch.ones(2).to_sparse()})
    for read in (tensors_at, ft_ckpt.load):
        with pytest.raises(LoadError, match=r"w .*sparse"):
            read(path)


def test_damage_is_noticed(tmp_path):
    content = bytearray(GOLDEN.read_bytes())
    content[content.index(b"archive/data/0") + 80] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CorruptError, match="checksum differs"):
        ft_ckpt.load(tmp_path / "x.ckpt", verify=True)
    (tmp_path / "x.ckpt").write_bytes(content[:3000])
    with pytest.raises(CorruptError):
        open_source(open_place(tmp_path / "x.ckpt"))


def test_convert_compares_checksums(tmp_path):
    content = bytearray(GOLDEN.read_bytes())
    weight = content.index(WEIGHTS["model.0.weight"].numpy().tobytes())
    for at in (weight, content.index(b"_rebuild_tensor_v2") + 1, content.index(b"model.1.weight")):
        content[at] ^= 1
        (tmp_path / "x.ckpt").write_bytes(content)
        content[at] ^= 1
        with pytest.raises(CorruptError, match="is damaged"):
            ft_ckpt.convert(tmp_path / "x.ckpt", tmp_path / "y.h5", progress=False)
    assert not (tmp_path / "y.h5").exists()


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_sharded_checkpoints_are_read_as_weights(tmp_path, key):
    tensors = {
        f"{key}.model.0.weight": torch.randn(4, 3),
        "optimizer_0.state.model.0.weight.step": torch.ones(()),
    }
    torch_dcp.save(tensors, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.0"}, tmp_path / "x.ckpt/meta.pt")
    report = ft_ckpt.convert(
        tmp_path / "x.ckpt", tmp_path / "y.safetensors", verify=True, progress=False
    )
    assert report.skipped == ("optimizer_0: 1 tensors", "meta.pt: the state of the training")
    check_weights(
        ft_ckpt.load(tmp_path / "y.safetensors", "cpu"),
        {"model.0.weight": tensors[f"{key}.model.0.weight"]},
    )


@pytest.mark.slow
def test_what_lightning_writes_now_is_read(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    maker = library_files.file_maker()
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.lightning()
    file = open_source(open_place(tmp_path / "lightning.ckpt"))
    check_weights(
        {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}, WEIGHTS
    )
    assert "hyper_parameters.config: make_library_files.Config" in file.skipped
