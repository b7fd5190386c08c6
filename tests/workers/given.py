"""Names and files that the scripts on each page assume: tiny models, their training objects, and
earlier runs.

One function per page, by the page's name: it takes the number of the script on it, and returns the
names.
"""

import copy
import os
import random
import socket
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import client_data
import models
import numpy as np
import torch
import trainers
from accelerate import Accelerator
from accelerate.utils import set_seed
from engine_server import serving
from hub_bucket_server import serving_buckets, using_buckets
from hub_server import serving_hub, using_hub
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver

GPUS = ("gpu-1", "gpu-2", "gpu-3")  # hosts with a server, on the page of publishing
_open = ExitStack()  # until the process ends
calls: list[int] = []  # one for each batch that a model of `parts` was trained on


def names_for(page: str, script: int) -> dict[str, Any]:
    """The names that script number `script` of a page begins with."""
    warnings.simplefilter("ignore")
    set_seed(0)
    make = globals().get(f"on_{page.lower().replace('-', '_')}")
    return {} if make is None else make(script)


def on_readme(_: int) -> dict[str, Any]:
    """What a script with a Trainer has made; the loop on the page makes its own objects."""
    args = trainers.TrainingArguments("runs/trainer", max_steps=4, save_steps=2, **trainers.SILENT)
    names = {"args": args, "SFTTrainer": trainers.Trainer, "data": trainers.Sentences(noise=False)}
    return names | parts(models.llama())


def on_page(_: int) -> dict[str, Any]:
    """Names for a page that a test assembles from the README's lines."""
    return {**on_readme(0), "calls": calls}


def on_index(script: int) -> dict[str, Any]:
    return on_saved(script) if script else parts(models.llama())


def on_saved(_: int) -> dict[str, Any]:
    """A script whose objects Accelerate has prepared, with a saver and functions that train."""
    names = prepared(models.llama())

    def train(batch: Any) -> torch.Tensor:
        return train_step(names, batch)

    saver = CheckpointSaver(names["accelerator"], "runs/sft", tokenizer=names["tokenizer"])
    return {
        **names,
        "train": train,
        "evaluate": lambda _: 2.0,
        "saver": saver,
        "CheckpointSaver": CheckpointSaver,
    }


on_full = on_background = on_hdf5 = on_files = on_contributing = on_object_stores = on_nodes = (
    on_saved
)


def on_lora(script: int) -> dict[str, Any]:
    save_base("base")
    torch.manual_seed(7)
    save_base("other")
    return {**on_saved(script), "data": trainers.Sentences(noise=False)}


def on_merge(script: int) -> dict[str, Any]:
    names = on_lora(script)
    make_adapter("base", "out/adapter")
    return names


def on_ppo(script: int) -> dict[str, Any]:
    return {
        **on_saved(script),
        "ppo_model": models.policy_and_value(),
        "ValueHead": models.ValueHead,
    }


def on_resume(script: int) -> dict[str, Any]:
    names = {**on_saved(0), **(parts(models.llama()) if script else {})}
    return {**names, "average": copy.deepcopy(names["model"]), "early_stopping": EarlyStopping()}


def on_schedule(script: int) -> dict[str, Any]:
    make_run("runs/sft")
    return on_saved(script)


def on_cli(script: int) -> dict[str, Any]:
    names = on_schedule(script)
    save_base("base")
    make_adapter("base", "out/adapter")
    return names


on_on_disk = on_average = on_sign = on_schedule


def on_push(script: int) -> dict[str, Any]:
    _open.enter_context(using_hub(_open.enter_context(serving_hub())))
    return on_schedule(script)


def on_hub_buckets(script: int) -> dict[str, Any]:
    _open.enter_context(
        using_buckets(_open.enter_context(serving_buckets(Path("../contents").absolute())))
    )
    return on_schedule(script)


def on_publish(script: int) -> dict[str, Any]:
    """Servers at the addresses that the page names, with the base of the adapters."""
    names = on_schedule(script)
    torch.manual_seed(1)
    base: Any = models.llama()
    base.save_pretrained("base")
    for folder, settings in {
        "runs/lora/checkpoint-500": {},
        "runs/patterns": {"alpha_pattern": {"q_proj": 2}},
    }.items():
        config = LoraConfig(
            r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **settings
        )
        model = get_peft_model(copy.deepcopy(base), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        with CheckpointSaver(None) as saver:
            saver.save(model, folder, step=500, adapter_only=True)
    for step in (1, 2):
        with CheckpointSaver(None) as saver:
            saver.save(
                base, f"runs/grpo/checkpoint-{step}", step=step, tokenizer=models.tokenizer()
            )
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.view(-1)[::100] *= 1.5
    engines = {
        host: _open.enter_context(serving(Path("base").absolute())) for host in ("127.0.0.1", *GPUS)
    }
    addresses = {
        (host, 8000): ("127.0.0.1", urlsplit(engine.url).port) for host, engine in engines.items()
    }
    connect = socket.create_connection
    socket.create_connection = lambda address, *rest, **more: connect(
        addresses.get(address, address), *rest, **more
    )
    return names


def on_writers(script: int) -> dict[str, Any]:
    """Start the processes beside the page's own, and return the names that its third script
    needs.
    """

    def provide(index: int | None) -> None:
        with ft_ckpt.Writer(
            "runs/grpo", "replay" if index is None else "rollout", index=index
        ) as writer:
            writer.provide(lambda: [1, 2])
            writer.wait(60)

    def train(seconds: float) -> None:
        names = prepared(models.llama())
        with CheckpointSaver(names["accelerator"], "runs/grpo") as saver:
            saver.invite("replay", rollout=2)
            time.sleep(seconds)

    if script:
        start_process(train, 3.0)
        generator = torch.Generator()
        Path("rollouts.jsonl").write_text("{}\n")
        made = {"step": 4, "samples": [1, 2], "generator": generator}
        return (
            {}
            if script == 1
            else {**made, "writer": ft_ckpt.Writer("runs/grpo", "rollout", index=0)}
        )
    for index in (0, 1, None):
        start_process(provide, index)
    return prepared(models.llama())


def start_process(action: Any, *arguments: Any) -> None:
    """Call `action` in a process of its own, which ends by itself."""
    if not os.fork():
        try:
            action(*arguments)
        finally:
            os._exit(0)


def on_convert(script: int) -> dict[str, Any]:
    ft_ckpt.save({"weight": torch.ones(2)}, "model.h5")
    return on_schedule(script)


def on_save_state(_: int) -> dict[str, Any]:
    return parts(models.llama())


on_api = on_save_state


def on_errors(script: int) -> dict[str, Any]:
    return on_ppo(script)


def on_trainer(script: int) -> dict[str, Any]:
    return on_readme(script)


TASK = """
import sys, time
sys.path[:0] = {path}
import models, torch, trainers

class Slow(trainers.Sentences):
    def __getitem__(self, index):
        time.sleep(0.005)  # a run of a few seconds, so that a signal comes before its end
        return super().__getitem__(index)

torch.manual_seed(0)
model, data = models.llama(), Slow(noise=False)
"""


def on_spot(_: int) -> dict[str, Any]:
    """The module with the reader's model and data."""
    Path("task.py").write_text(TASK.format(path=[str(Path(models.__file__).parent)]))
    return {}


def on_offline(_: int) -> dict[str, Any]:
    """A cache of the Hub with one model, as `hf download` fills it."""
    on_spot(0)
    revision = "1" * 40
    repository = Path("hub/hub/models--org--tiny")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    save_base(str(repository / "snapshots" / revision))
    return {}


def on_qlora(_: int) -> dict[str, Any]:
    """A base whose layers are large enough for the blocks of bitsandbytes."""
    base: Any = models.llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    base.bfloat16().save_pretrained("base")
    models.tokenizer().save_pretrained("base")
    return {"data": trainers.Sentences(noise=False)}


def on_troubleshooting(script: int) -> dict[str, Any]:
    return {**on_saved(script), "base": models.qwen3(), "make_base": models.qwen3}


def on_early_stopping(script: int) -> dict[str, Any]:
    if script:
        losses = iter([3.0, 2.0, 2.5, 2.6, 1.0])
        return {**on_saved(script), "evaluate": lambda _: next(losses)}
    return {"model": models.llama(), "data": trainers.Sentences(noise=False)}


def on_accumulation(_: int) -> dict[str, Any]:
    return parts(models.llama())


def on_llama_factory(_: int) -> dict[str, Any]:
    client_data.make_base(Path())
    client_data.write_llama_factory_data(Path())
    return {}


def on_ms_swift(_: int) -> dict[str, Any]:
    client_data.make_base(Path())
    client_data.write_swift_data(Path())
    return {}


def on_lightning(script: int) -> dict[str, Any]:
    data = DataLoader(trainers.Sentences(noise=False), batch_size=2)
    return {"model": models.llama(), "data": data, "tokenizer": models.tokenizer()}


def on_from_trainer(_: int) -> dict[str, Any]:
    return {"model": models.llama(), "data": trainers.Sentences(noise=False)}


def on_from_lightning(script: int) -> dict[str, Any]:
    """The module that docs/lightning.md has."""
    from lightning.pytorch import LightningModule

    class Tuned(LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return {**on_lightning(script), "Tuned": Tuned}


def on_from_dcp(_: int) -> dict[str, Any]:
    """One rank of a process group, as torchrun starts it."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    return {"model": models.llama(), "loader": parts(models.llama())["loader"]}


def on_open_instruct(script: int) -> dict[str, Any]:
    return on_grpo_state() if script else {**on_ppo(script), "model": models.lora()}


def on_grpo_state() -> dict[str, Any]:
    """A DeepSpeed engine of one rank, and the folder that open-instruct's trainer leaves after its
    second step.
    """
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }

    def make_engine() -> Any:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        given = {"optimizer": optimizer, "lr_scheduler": scheduler, "dist_init_required": False}
        return deepspeed.initialize(
            model=model, config={**config, "zero_allow_untested_optimizer": True}, **given
        )[0]

    def train_one_step(engine: Any) -> None:
        engine.backward(engine(torch.randn(2, 4).bfloat16()).float().square().mean())
        engine.step()

    left = make_engine()
    client = {
        "training_step": 2,
        "episode": 128,
        "num_total_tokens": 9000,
        "dataloader_state": {"training_step": 2},
    }
    states = {
        "torch_cpu_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.get_state(),
    }
    states["python_rng_state"] = random.getstate()
    left.save_checkpoint("out/state", client_state={**client, "rng_states": states, "rank": 0})
    return {"engine": make_engine(), "train_one_step": train_one_step}


class EarlyStopping:
    """An object of the script with a state dict."""

    best = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


def parts(model: Any) -> dict[str, Any]:
    """A model with tokenizer, optimizer, loader and scheduler; seven batches a pass."""
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-3
    )
    loader: Any = DataLoader(trainers.Sentences(noise=False), batch_size=2, shuffle=True)
    model.register_forward_pre_hook(lambda *_: calls.append(1) if model.training else None)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    names = {
        "model": model.train(),
        "optimizer": optimizer,
        "loader": loader,
        "scheduler": scheduler,
    }
    return {**names, "tokenizer": models.tokenizer()}


def prepared(model: Any) -> dict[str, Any]:
    """`parts`, prepared by Accelerate."""
    names, accelerator = parts(model), Accelerator()
    for name in ("model", "optimizer", "loader", "scheduler"):
        names[name] = accelerator.prepare(names[name])
    return {**names, "accelerator": accelerator}


def train_step(names: dict[str, Any], batch: Any) -> torch.Tensor:
    loss = names["model"](**batch).loss
    names["accelerator"].backward(loss)
    names["optimizer"].step()
    names["optimizer"].zero_grad()
    return loss


def make_run(folder: str) -> None:
    """A run with three checkpoints, the second the best, and its weights in `final`."""
    if Path(folder).exists():
        return
    names = prepared(models.llama())
    with CheckpointSaver(names["accelerator"], folder, tokenizer=names["tokenizer"]) as saver:
        saver.resume()
        for step, loss in {500: 2.31, 1000: 2.07, 1500: 2.11}.items():
            train_step(names, next(iter(names["loader"])))
            saver.step(step=step)
            saver.save_state(metrics={"eval_loss": loss})
        saver.save(names["model"], Path(folder) / "final")


def make_adapter(base: str, folder: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def save_base(folder: str) -> None:
    """A base model in a folder."""
    model: Any = models.qwen3()
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
