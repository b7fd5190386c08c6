"""Saves models of diffusers, and loads them with diffusers itself: `clients_diffusers.py CASE
FOLDER`.

A case is a function of this file. It runs in the environment of scripts/clients_environment.
"""

import copy
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.training_utils import EMAModel
from pages import blocks_of
from peft import LoraConfig, get_peft_model
from places import ROOT
from safetensors import safe_open

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every
from ft_ckpt.errors import BaseMismatchError, CompanionError, LoadError, SelectionError

UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
TRANSFORMER: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 8,
    "out_channels": 4,
}
FLUX: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "axes_dims_rope": (4, 4, 8),
}
VAE: dict[str, Any] = {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 8}
CONTROL: dict[str, Any] = {**UNET, "conditioning_embedding_out_channels": (8,)}
del CONTROL["sample_size"], CONTROL["up_block_types"]
MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": UNET,
    "UNet2DModel": {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "SD3Transformer2DModel": TRANSFORMER,
    "FluxTransformer2DModel": FLUX,
    "AutoencoderKL": VAE,
    "ControlNetModel": CONTROL,
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**MODELS[name])


def with_lora(model: Any, **settings: Any) -> Any:
    """The model with a LoRA adapter whose matrices are all trained."""
    fields: dict[str, Any] = {"r": 2, "target_modules": ["to_q", "to_v"], **settings}
    model.add_adapter(LoraConfig(**fields))
    draw_adapter(model)
    return model


def draw_adapter(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def assert_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    one, two = model.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


def adapter_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def assert_equal_adapters(model: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = list(zip(adapter_of(model), adapter_of(other), strict=True))
    assert pairs
    for one, two in pairs:
        assert torch.equal(one, two)


def output(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    sample = torch.randn(1, 4, 8, 8, generator=generator)
    states = torch.randn(1, 3, 8, generator=generator)
    with torch.no_grad():
        result: torch.Tensor = unet.eval()(sample, 1, states).sample
    return result


def pipeline_with(unet: Any) -> Any:
    parts = dict.fromkeys(
        ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    )
    return diffusers.StableDiffusionPipeline(
        unet=unet, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **parts
    )


# Cases


def models(folder: Path) -> None:
    """Each kind of model: whole, in shards, cast; read by `from_pretrained` and `load_model`."""
    with CheckpointSaver(None) as saver:
        for name in MODELS:
            model, cls = make(name), getattr(diffusers, name)
            config = copy.deepcopy(dict(model.config))
            model.save_pretrained(folder / "theirs")
            saver.save(model, folder / name)
            assert dict(model.config) == {
                **config,
                **{key: model.config[key] for key in model.config if key[0] == "_"},
            }
            own, theirs = ((folder / one / "config.json").read_text() for one in (name, "theirs"))
            assert own == theirs
            saver.save(model, folder / f"{name}-shards", max_shard_size="20KB")
            assert (
                folder / f"{name}-shards/diffusion_pytorch_model.safetensors.index.json"
            ).exists()
            for place in (name, f"{name}-shards"):
                assert_equal(model, cls.from_pretrained(folder / place))
                assert_equal(model, ft_ckpt.load_model(folder / place))
                assert ft_ckpt.verify(folder / place).ok
            saver.save(model, folder / f"{name}-cast", dtype="bfloat16")
            half = cls.from_pretrained(folder / name, torch_dtype=torch.bfloat16)
            assert_equal(
                half, cls.from_pretrained(folder / f"{name}-cast", torch_dtype=torch.bfloat16)
            )
            filled = make(name).to(torch.bfloat16)
            ft_ckpt.load_model(folder / f"{name}-cast", into=filled)
            ft_ckpt.convert(folder / name, folder / f"{name}-h5", format="h5", progress=False)
            assert_equal(model, ft_ckpt.load_model(folder / f"{name}-h5"))
            ft_ckpt.convert(
                folder / f"{name}-h5", folder / f"{name}-back", format="safetensors", progress=False
            )
            assert_equal(model, cls.from_pretrained(folder / f"{name}-back"))


def lora(folder: Path) -> None:
    """LoRA on a UNet: read by a pipeline without arguments, by `load_model`, merged; several
    adapters, a PeftModel.
    """
    base = make("UNet2DConditionModel")
    base.save_pretrained(folder / "base")
    model = with_lora(
        diffusers.UNet2DConditionModel.from_pretrained(folder / "base"),
        init_lora_weights="gaussian",
    )
    with CheckpointSaver(None) as saver:
        report = saver.save(model, folder / "lora", adapter_only=True)
        assert not report.notes
        with safe_open(folder / "lora/pytorch_lora_weights.safetensors", "pt") as file:
            assert all(name.startswith("unet.") for name in file.keys())  # noqa: SIM118 - not a dict
            settings = json.loads(file.metadata()["lora_adapter_metadata"])
        assert settings["unet.r"] == 2
        assert str(folder) not in json.dumps(settings)

        pipeline = pipeline_with(diffusers.UNet2DConditionModel.from_pretrained(folder / "base"))
        pipeline.load_lora_weights(folder / "lora")
        assert_equal_adapters(model, pipeline.unet)
        torch.testing.assert_close(output(pipeline.unet), output(model), rtol=1e-4, atol=1e-4)
        loaded = ft_ckpt.load_model(folder / "lora")  # the base is named by its folder
        assert_equal_adapters(model, loaded)
        other = make("UNet2DConditionModel").apply(
            lambda module: getattr(module, "reset_parameters", int)()
        )
        refused(BaseMismatchError, lambda: ft_ckpt.load_model(folder / "lora", base=other))

        saver.save(model, folder / "cast", adapter_only=True, dtype="bfloat16")
        pipeline = pipeline_with(diffusers.UNet2DConditionModel.from_pretrained(folder / "base"))
        pipeline.load_lora_weights(folder / "cast")
        for one, two in zip(adapter_of(model), adapter_of(pipeline.unet), strict=True):
            assert torch.equal(one.bfloat16(), two.bfloat16())

        saver.save(model, folder / "merged", merged=True)
        saver.save(model, folder / "both", adapter_only=False)
        ft_ckpt.merge(folder / "lora", folder / "merged-files", progress=False)
        merged = diffusers.UNet2DConditionModel.from_pretrained(folder / "merged")
        assert_equal(
            merged, diffusers.UNet2DConditionModel.from_pretrained(folder / "merged-files")
        )
        torch.testing.assert_close(output(merged), output(model), rtol=1e-4, atol=1e-4)
        assert_equal_adapters(model, ft_ckpt.load_model(folder / "both"))

        model.add_adapter(LoraConfig(r=3, target_modules=["to_k"]), "second")
        draw_adapter(model)
        saver.save(model, folder / "two", adapter_only=True)
        pipeline = pipeline_with(diffusers.UNet2DConditionModel.from_pretrained(folder / "base"))
        pipeline.load_lora_weights(folder / "two", adapter_name="first")
        pipeline.load_lora_weights(folder / "two/second", adapter_name="other")
        both = dict(pipeline.unet.named_parameters())
        for name, parameter in model.named_parameters():
            stored = name.replace(".second.", ".other.").replace(".default.", ".first.")
            assert torch.equal(parameter, both[stored]), name

        wrapped: Any = get_peft_model(
            diffusers.UNet2DConditionModel.from_pretrained(folder / "base"),
            LoraConfig(r=2, target_modules=["to_q"]),
        )
        draw_adapter(wrapped)
        saver.save(wrapped, folder / "wrapped", adapter_only=True)
        pipeline = pipeline_with(diffusers.UNet2DConditionModel.from_pretrained(folder / "base"))
        pipeline.load_lora_weights(folder / "wrapped")
        assert_equal_adapters(wrapped, pipeline.unet)


def lora_settings(folder: Path) -> None:
    """Each setting of LoRA that changes the output gives diffusers' loader the same model."""
    for number, settings in enumerate(
        (
            {"use_rslora": True, "lora_alpha": 16},
            {"use_dora": True},
            {"rank_pattern": {"attn1.to_q": 4}, "alpha_pattern": {"attn2.to_v": 3}},
            {"lora_bias": True},
            {"init_lora_weights": "orthogonal"},
            {"target_modules": ["conv1", "to_out.0"]},
            {"target_modules": "all-linear", "exclude_modules": ["to_k"]},
        )
    ):
        model = with_lora(make("UNet2DConditionModel"), **settings)
        with CheckpointSaver(None) as saver:
            report = saver.save(model, folder / f"lora-{number}", adapter_only=True)
        assert not report.notes, report.notes
        pipeline = pipeline_with(make("UNet2DConditionModel"))
        pipeline.load_lora_weights(folder / f"lora-{number}")
        assert_equal_adapters(model, pipeline.unet)
        torch.testing.assert_close(output(pipeline.unet), output(model), rtol=1e-4, atol=1e-4)
    for number, settings in enumerate(
        ({"bias": "lora_only", "target_modules": ["to_out.0"]}, {"init_lora_weights": "pissa"})
    ):
        model = with_lora(make("UNet2DConditionModel"), **settings)
        with CheckpointSaver(None) as saver:
            report = saver.save(model, folder / f"peft-{number}", adapter_only=True)
        assert "load_lora_weights cannot read" in " ".join(report.notes), settings
        assert (folder / f"peft-{number}/adapter_model.safetensors").exists()
        assert_equal_adapters(
            model, ft_ckpt.load_model(folder / f"peft-{number}", base=make("UNet2DConditionModel"))
        )


def lora_of_transformers(folder: Path) -> None:
    """LoRA on a transformer is read under the name that its pipelines give to it."""
    for name in ("SD3Transformer2DModel", "FluxTransformer2DModel"):
        model, other = with_lora(make(name)), make(name)
        with CheckpointSaver(None) as saver:
            saver.save(model, folder / name, adapter_only=True)
        # its prefix is "transformer" by default
        other.load_lora_adapter(folder / name, use_safetensors=True)
        assert_equal_adapters(model, other)


def refusals(folder: Path) -> None:
    """What cannot be saved or loaded is refused with the remedy."""
    unet = make("UNet2DConditionModel")
    with CheckpointSaver(None) as saver:
        why = refused(SelectionError, lambda: saver.save(pipeline_with(unet), folder / "pipeline"))
        assert "pipeline.unet" in why
        unet.conv_in = torch.nn.Conv2d(8, 8, 3, padding=1)
        why = refused(CompanionError, lambda: saver.save(unet, folder / "changed"))
        assert "conv_in.weight" in why
        assert "register_to_config" in why
        unet.register_to_config(in_channels=8)
        saver.save(unet, folder / "changed")
        assert_equal(unet, diffusers.UNet2DConditionModel.from_pretrained(folder / "changed"))
    config = json.loads((folder / "changed/config.json").read_text())
    assert config["in_channels"] == 8

    class Own(diffusers.UNet2DConditionModel):
        pass

    own = Own(**UNET)
    with CheckpointSaver(None) as saver:
        saver.save(own, folder / "own")
    refused(LoadError, lambda: ft_ckpt.load_model(folder / "own"))
    assert_equal(own, ft_ckpt.load_model(folder / "own", classes={"Own": Own}))
    assert_equal(own, Own.from_pretrained(folder / "own"))


def page(folder: Path) -> None:
    """The blocks of docs/diffusers.md."""
    os.chdir(folder)
    unet = make("UNet2DConditionModel")
    names = {
        "unet": unet,
        "pipeline": pipeline_with(make("UNet2DConditionModel")),
        "LoraConfig": LoraConfig,
    }
    names |= {"ft_ckpt": ft_ckpt, "saver": CheckpointSaver(None)}
    blocks = [block for block in blocks_of(ROOT / "docs/diffusers.md") if block.is_of_clients]
    assert blocks
    for block in blocks:
        exec(block.code, names)
    assert_equal(unet, diffusers.UNet2DConditionModel.from_pretrained("out/unet"))
    assert_equal_adapters(names["unet"], names["pipeline"].unet)


def sharded(folder: Path) -> None:
    """Under FSDP2: whole models in shards of the ranks, and LoRA."""
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    plain, model = make("UNet2DConditionModel"), make("UNet2DConditionModel")
    adapted, other = (
        with_lora(make("UNet2DConditionModel")),
        with_lora(make("UNet2DConditionModel")),
    )
    fully_shard(model)
    fully_shard(other)
    with CheckpointSaver(accelerator) as saver:
        saver.save(model, folder / "full")
        saver.save(other, folder / "lora", adapter_only=True)
    config = json.loads((folder / "full/config.json").read_text())
    assert config["_class_name"] == "UNet2DConditionModel"
    assert_equal(plain, diffusers.UNet2DConditionModel.from_pretrained(folder / "full"))
    pipeline = pipeline_with(make("UNet2DConditionModel"))
    pipeline.load_lora_weights(folder / "lora")
    assert_equal_adapters(adapted, pipeline.unet)


def run(folder: Path, kind: str, kill_at: str) -> None:
    """Train a UNet ("full") with an average of its weights, or LoRA on it; the process is killed
    after a step.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    unet = make("UNet2DConditionModel")
    if kind == "lora":
        unet.requires_grad_(False)
        with_lora(unet)
    noise = diffusers.DDPMScheduler(num_train_timesteps=10)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    average = EMAModel(trained, decay=0.9, model_cls=type(unet), model_config=unet.config)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    images = torch.utils.data.TensorDataset(torch.randn(16, 4, 8, 8), torch.randn(16, 3, 8))
    loader = torch.utils.data.DataLoader(images, batch_size=2, shuffle=True)
    scheduler = diffusers.optimization.get_scheduler(
        "cosine", optimizer, num_warmup_steps=2, num_training_steps=12
    )
    unet, optimizer, loader, scheduler = accelerator.prepare(unet, optimizer, loader, scheduler)
    every = Every(steps=2, signals=())
    with CheckpointSaver(accelerator, folder / "run", every=every) as saver:
        saver.register(average=average)
        saver.resume()
        log = (folder / "losses").open("a")
        for image, text in saver.remaining(loader, epochs=3):
            with accelerator.accumulate(unet):
                target = torch.randn_like(image)
                times = torch.randint(10, (len(image),))
                guess = unet(noise.add_noise(image, target, times), times, text).sample
                loss = torch.nn.functional.mse_loss(guess, target)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(trained)
            saver.step()
            print(saver.progress.step, loss.item().hex(), file=log, flush=True)
            if saver.progress.step == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
    torch.save([average.state_dict(), unet.state_dict(), optimizer.state_dict()], folder / "end.pt")


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    case, place, *rest = sys.argv[1:]
    globals()[case](Path(place), *rest)
    print("done")
