"""Models of Keras, as Keras wrote them: names that people know, exact values, and a refusal for
what is damaged.
"""

import io
import json
import zipfile

import h5py
import library_files
import numpy as np
import pytest
import torch
from library_files import numbered

import ft_ckpt
from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.storage.places import open_place

GOLDEN = library_files.FOLDER
NAMED = {
    "hidden/kernel": numbered(0, 3, 4),
    "hidden/bias": numbered(1, 4),
    "inner/dense/kernel": numbered(2, 4, 2),
    "inner/norm/gamma": numbered(3, 2),
    "inner/norm/beta": numbered(4, 2),
    "inner/norm/moving_mean": numbered(5, 2),
    "inner/norm/moving_variance": numbered(6, 2),
    "last/kernel": numbered(7, 2, 1),
    "last/bias": numbered(8, 1),
}
ORDER = {"kernel": 0, "bias": 1, "gamma": 0, "beta": 1, "moving_mean": 2, "moving_variance": 3}
NUMBERED = {
    f"{name.rpartition('/')[0]}/{ORDER[name.rpartition('/')[2]]}": one
    for name, one in NAMED.items()
}
HALF = [numbered(0, 3, 2, dtype=torch.bfloat16), numbered(1, 2, dtype=torch.bfloat16)]
KERAS_2 = [
    "dense/kernel",
    "dense/bias",
    "norm/gamma",
    "norm/beta",
    "norm/moving_mean",
    "norm/moving_variance",
]
FILES = {
    "keras.h5": NAMED,
    "keras.weights.h5": NUMBERED,
    "keras.keras": NUMBERED,
    "bfloat16.h5": dict(zip(("net/half/kernel", "net/half/bias"), HALF, strict=True)),
    "bfloat16.keras": dict(zip(("half/0", "half/1"), HALF, strict=True)),
    "keras2.h5": {
        name: numbered(i, *((3, 2) if i == 0 else (2,))) for i, name in enumerate(KERAS_2)
    },
}


def tensors(path):
    file = open_source(open_place(path))
    found = {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}
    file.close()
    return found


def check_tensors(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def changed(path, change, golden="keras.keras", **options):
    """The archive `golden` with its records as `change` leaves them."""
    with zipfile.ZipFile(GOLDEN / golden) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


def without_names(records):
    """As versions of Keras wrote it that did not say the names of layers."""
    data = io.BytesIO(records["model.weights.h5"])
    with h5py.File(data, "r+") as file:
        groups = [file]
        file.visititems(lambda _, item: groups.append(item))
        for group in groups:
            group.attrs.pop("name", None)
    records["model.weights.h5"] = data.getvalue()


@pytest.mark.parametrize("name", FILES)
def test_tensors_have_the_names_and_values_of_the_model(name):
    check_tensors(tensors(GOLDEN / name), FILES[name])


@pytest.mark.parametrize("name", ["keras.h5", "keras.keras"])
def test_convert_keeps_the_config_and_says_what_it_left_out(tmp_path, name):
    report = ft_ckpt.convert(GOLDEN / name, tmp_path / "x.safetensors", verify=True, progress=False)
    assert report.skipped[0].endswith(": 2 tensors that are not the model's")
    header = (tmp_path / "x.safetensors").read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert json.loads(metadata["model_config"])["config"]["name"] == "net"
    assert metadata["keras_version"].startswith("3.")
    check_tensors(ft_ckpt.load(tmp_path / "x.safetensors", "cpu"), FILES[name])


def test_load_gives_an_archive_by_name_and_an_hdf5_file_as_it_is():
    check_tensors(ft_ckpt.load(GOLDEN / "keras.keras"), NUMBERED)
    found = ft_ckpt.load(GOLDEN / "keras.h5")
    assert torch.equal(found["model_weights"]["hidden"]["hidden"]["kernel"], NAMED["hidden/kernel"])


def test_names_come_from_the_config_where_the_weights_have_none(tmp_path):
    check_tensors(tensors(changed(tmp_path / "x.keras", without_names)), NUMBERED)
    lost = changed(
        tmp_path / "y.keras", lambda records: (without_names(records), records.pop("config.json"))
    )
    assert set(tensors(lost)) >= {"dense/0", "sequential/batch_normalization/3"}


def test_a_list_of_names_may_be_cut_into_several(tmp_path):
    (tmp_path / "x.h5").write_bytes((GOLDEN / "keras2.h5").read_bytes())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        names = file.attrs.pop("layer_names")
        file.attrs["layer_names0"], file.attrs["layer_names1"] = names[:1], names[1:]
    check_tensors(tensors(tmp_path / "x.h5"), FILES["keras2.h5"])


def test_two_layers_of_one_name_keep_their_places(tmp_path):
    with h5py.File(tmp_path / "x.weights.h5", "w") as file:
        for group in ("layers/dense", "layers/dense_1"):
            file[f"{group}/vars/0"] = np.ones(2, "f4")
            file[f"{group}/vars"].attrs["name"] = "same"
    assert set(tensors(tmp_path / "x.weights.h5")) == {
        "layers/dense/vars/0",
        "layers/dense_1/vars/0",
    }


def test_a_type_that_the_file_does_not_name_is_said(tmp_path):
    with h5py.File(tmp_path / "x.weights.h5", "w") as file:
        file["dense/vars/0"] = np.zeros(3, "V1")
        file["dense/vars/1"] = np.ones(3, "f4")
    file = open_source(open_place(tmp_path / "x.weights.h5"))
    assert set(file.specs) == {"dense/1"}
    assert list(file.skipped) == ["dense/0: values of a type that the file does not name (void8)"]


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            lambda records: records.pop("model.weights.h5"),
            {},
            LoadError,
            r"no model\.weights\.h5 in it, but nothing",
        ),
        (
            lambda _: None,
            {"compression": zipfile.ZIP_DEFLATED},
            CorruptError,
            "compressed, expected one that is st",
        ),
        (
            lambda records: records.update({"config.json": b"{"}),
            {},
            CorruptError,
            "archive of Keras",
        ),
        (
            lambda records: records.update({"model.weights.h5": b"x" * 99}),
            {},
            CorruptError,
            "not whole",
        ),
        (
            lambda records: records.update({"config.json": b'{"config": {"layers": [7]}}'}),
            {},
            CorruptError,
            "archive",
        ),
    ],
)
def test_odd_archives_are_refused(tmp_path, change, options, error, message):
    path = changed(tmp_path / "x.keras", change, **options)
    with pytest.raises(error, match=message):
        tensors(path)


def test_a_list_of_weights_that_are_not_there_is_refused(tmp_path):
    (tmp_path / "x.h5").write_bytes((GOLDEN / "keras2.h5").read_bytes())
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file["dense/dense/kernel:0"]
    with pytest.raises(
        CorruptError, match="dense/dense/kernel:0: listed as weights, but not in the file"
    ):
        tensors(tmp_path / "x.h5")


def test_files_in_an_archive_beside_the_weights_are_named(tmp_path):
    path = changed(tmp_path / "x.keras", lambda records: records.update({"assets/words.txt": b"a"}))
    assert "assets/words.txt: a file of the archive" in open_source(open_place(path)).skipped


@pytest.mark.slow
def test_what_keras_writes_now_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    maker = library_files.file_maker()
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.keras()
    for name in FILES.keys() - {"keras2.h5"}:
        check_tensors(tensors(tmp_path / name), FILES[name])


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path):
    whole = (GOLDEN / "keras.keras").read_bytes()
    for pattern in (NAMED["hidden/kernel"].numpy().tobytes(), b'"class_name"'):
        content = bytearray(whole)
        content[content.index(pattern) + 2] ^= 1
        (tmp_path / "x.keras").write_bytes(content)
        with pytest.raises(CorruptError, match="is damaged"):
            open_source(open_place(tmp_path / "x.keras"))
