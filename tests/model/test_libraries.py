"""Models of diffusers, by a class with the members of theirs that a save uses; tests/clients has
the real ones.
"""

import json

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from torch import nn

import ft_ckpt
from ft_ckpt.errors import CompanionError, LoadError, SelectionError


class ModelMixin(nn.Module):
    __module__ = "diffusers.models.modeling_utils"

    def save_pretrained(self, folder):
        raise AssertionError("a save writes the files itself")


class ConfigMixin:
    __module__ = "diffusers.configuration_utils"

    def to_json_string(self) -> str:
        return json.dumps(
            {
                **self._internal_dict,
                "_class_name": type(self).__name__,
                "_diffusers_version": "0.42.1",
            }
        )

    @classmethod
    def from_config(cls, config):
        return cls(**{name: value for name, value in config.items() if not name.startswith("_")})


class TinyUNet(ModelMixin, ConfigMixin):
    __module__ = "diffusers.models.unets"

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self._internal_dict = {"width": width, "_name_or_path": "/some/folder"}
        self.to_q, self.to_out = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    @property
    def config(self):
        return self._internal_dict


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return TinyUNet()


def adapted(unet, **settings):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"], **settings), unet)
    return unet


def test_a_model_is_saved_under_the_names_of_its_library(unet, tmp_path):
    ft_ckpt.CheckpointSaver(None).save(unet, tmp_path / "out", max_shard_size="100B")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "ft_ckpt.json",
        "diffusion_pytorch_model.safetensors.index.json",
        *(f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)),
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    # without the local path
    assert config == {"width": 4, "_class_name": "TinyUNet", "_diffusers_version": "0.42.1"}
    assert unet.config["_name_or_path"] == "/some/folder"
    loaded = ft_ckpt.load_model(tmp_path / "out", into=TinyUNet())
    assert all(
        torch.equal(one, two)
        for one, two in zip(unet.parameters(), loaded.parameters(), strict=True)
    )


def test_without_the_library_a_load_says_what_to_do(unet, tmp_path):
    ft_ckpt.CheckpointSaver(None).save(unet, tmp_path / "out")
    with pytest.raises(LoadError, match=r"TinyUNet.*into="):
        ft_ckpt.load_model(tmp_path / "out")


def test_a_config_of_another_model_is_refused(unet, tmp_path):
    unet.to_q = nn.Linear(8, 4, bias=False)
    with pytest.raises(
        CompanionError, match=r"to_q.weight: \(4, 8\), and \(4, 4\).*register_to_config"
    ):
        ft_ckpt.CheckpointSaver(None).save(unet, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_converted_files_keep_the_names(unet, tmp_path):
    ft_ckpt.CheckpointSaver(None).save(unet, tmp_path / "out")
    ft_ckpt.convert(tmp_path / "out", tmp_path / "h5", format="h5", progress=False)
    ft_ckpt.convert(tmp_path / "h5", tmp_path / "back", format="safetensors", progress=False)
    assert (tmp_path / "h5/diffusion_pytorch_model.h5").exists()
    files = [
        folder / "diffusion_pytorch_model.safetensors"
        for folder in (tmp_path / "out", tmp_path / "back")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_lora_is_saved_as_pipelines_read_it(unet, tmp_path):
    report = ft_ckpt.CheckpointSaver(None).save(
        adapted(unet, lora_alpha=6), tmp_path / "out", adapter_only=True
    )
    assert report.notes == ()
    with safe_open(tmp_path / "out/pytorch_lora_weights.safetensors", "pt") as file:
        assert set(file.keys()) == {"unet.to_q.lora_A.weight", "unet.to_q.lora_B.weight"}
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (settings["unet.r"], settings["unet.lora_alpha"], settings["unet.target_modules"]) == (
        2,
        6,
        ["to_q"],
    )
    assert "library_name: diffusers" in (tmp_path / "out/README.md").read_text()
    loaded = ft_ckpt.load_model(tmp_path / "out", base=TinyUNet(), check_base=False)
    stored = {name: tensor for name, tensor in loaded.state_dict().items() if "lora" in name}
    assert len(stored) == 2
    assert all(
        torch.equal(tensor, unet.state_dict()[name.removeprefix("base_model.model.")])
        for name, tensor in stored.items()
    )


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"init_lora_weights": "pissa"}], ids=str)
def test_what_pipelines_cannot_read_keeps_the_layout_of_peft(unet, settings, tmp_path):
    report = ft_ckpt.CheckpointSaver(None).save(
        adapted(unet, **settings), tmp_path / "out", adapter_only=True
    )
    assert (tmp_path / "out/adapter_model.safetensors").exists()
    assert "load_lora_weights cannot read" in " ".join(report.notes)


class Several(ModelMixin):
    """Without a config, as MultiControlNetModel: its save_pretrained writes a folder for each
    model.
    """

    __module__ = "diffusers.models.controlnets"

    def __init__(self, *nets: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)


def test_several_models_in_one_are_refused_with_their_places(unet, tmp_path):
    with pytest.raises(
        SelectionError, match=r"Several: has a layout of its own.*'nets\.0', 'nets\.1'"
    ):
        ft_ckpt.CheckpointSaver(None).save(Several(unet, TinyUNet()), tmp_path / "out")


def test_a_pipeline_is_refused_with_the_names_of_its_models(unet, tmp_path):
    class Pipeline:
        components = {"unet": unet, "scheduler": object(), "vae": unet}  # noqa: RUF012 - as diffusers has it

    with pytest.raises(SelectionError, match=r"pipeline\.unet, pipeline\.vae"):
        ft_ckpt.CheckpointSaver(None).save(Pipeline(), tmp_path / "out")
