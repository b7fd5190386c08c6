"""Train one step under a wrapper, save through ft_ckpt, and leave the true parameters beside what was saved.

A case is "wrapper/what"; its folder gets `saved/` (by ft_ckpt) and `truth.safetensors` (by torch).
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import torch
import torch.distributed as dist
from cases import SAVES
from counting import CollectiveBytes, peak_memory
from safetensors.torch import save_file
from tuning import buckets_of
from wrappers import WRAPPERS, Live, named_tensors, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.gather import stream_chunks
from ft_ckpt.distributed.ranks import current_ranks
from ft_ckpt.distributed.tensors import ModelTensors

Settings = dict[str, Any]


def live_model(wrapper: str, model: str) -> Live:
    """That model under that wrapper, after one step on data that differs by rank."""
    live = WRAPPERS[wrapper](models.build(model))
    # Tracing takes seconds and changes nothing that is saved: real compilation in one place, its wrappers everywhere.
    real = (wrapper, model) == ("compiled", "partly_frozen")
    torch.compiler.set_stance("default" if real else "force_eager")
    live.step(models.batch(seed=harness.RANK))
    return live


def save(live: Live, folder: Path, tokenizer: Any = None, **settings: Any) -> None:
    """Save the model, and write the expected parameters beside it."""
    with CheckpointSaver(live.accelerator, tokenizer=tokenizer, enter_timeout_seconds=60) as saver:
        report = saver.save(live.model, folder / "saved", **settings)
    assert report.path == folder / "saved", report
    write_truth(live, folder)


def write_truth(live: Live, folder: Path) -> None:
    tensors = truth(live)
    if harness.RANK == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "truth.safetensors")


def plain_save(live: Live, folder: Path, settings: Settings) -> None:
    """Save twice with a step between: the second save has the tensors of its own moment."""
    with CheckpointSaver(live.accelerator, tokenizer=models.tokenizer(), enter_timeout_seconds=60) as saver:
        saver.save(live.model, folder / "saved", **settings)
        live.step(models.batch(seed=20 + harness.RANK))
        report = saver.save(live.model, folder / "saved", **settings)
    assert report.path == folder / "saved", report
    write_truth(live, folder)


def untouched(live: Live, folder: Path, settings: Settings) -> None:
    """Saving changes no local tensor, and the next step still trains."""
    before, flags = digest(live), gradient_flags(live)
    save(live, folder, models.tokenizer(), **settings)
    assert digest(live) == before, "saving changed the live model"
    assert gradient_flags(live) == flags, "saving changed which parameters are trained"
    live.step(models.batch(seed=10 + harness.RANK))
    changed = digest(live) != before or harness.WORLD > 1
    assert changed, "the step after saving trained nothing"
    after = truth(live)
    assert any(not torch.equal(after[name], tensor) for name, tensor in saved_truth(folder).items())


def after_eval(live: Live, folder: Path, settings: Settings) -> None:
    """An evaluation leaves some engines with gathered parameters, in the lower precision of the forward pass."""
    live.model.eval()
    with torch.no_grad():
        live.model(**models.batch(seed=3))
    save(live, folder, **settings)


def digest(live: Live) -> str:
    """A hash over the name, type, shape and bytes of every tensor this rank holds."""
    sha = hashlib.sha256()
    for name, tensor in named_tensors(live.model):
        local = getattr(tensor, "ds_tensor", tensor)
        local = local.to_local() if hasattr(local, "to_local") else local
        sha.update(f"{name} {type(tensor).__name__} {tuple(tensor.shape)} {tuple(local.shape)}".encode())
        sha.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradient_flags(live: Live) -> list[bool]:
    return [parameter.requires_grad for parameter in live.model.parameters()]


def saved_truth(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if dist.is_initialized():
        dist.barrier()  # rank 0 has written it by then
    return load_file(folder / "truth.safetensors")


def adapter_bytes(live: Live, folder: Path, settings: Settings) -> None:
    """An adapter save moves no bytes of the base between ranks, and a full save does (so the counter counts)."""
    named = dict(named_tensors(live.model))
    sizes = {name: (getattr(t, "ds_numel", None) or t.numel()) * t.element_size() for name, t in named.items()}
    adapter = sum(size for name, size in sizes.items() if "lora_" in name)
    with CollectiveBytes() as moved:
        saver_only(live, folder, settings)
    assert moved.bytes <= adapter + 65536, f"moved {moved.bytes} bytes for an adapter of {adapter}: {moved.by_op}"
    with CollectiveBytes() as moved, CheckpointSaver(live.accelerator) as saver:
        saver.save(live.model, folder / "all", adapter_only=False)
    assert moved.bytes > sum(sizes.values()) / 4, f"the counter saw {moved.bytes} bytes of a full save"
    write_truth(live, folder)


def saver_only(live: Live, folder: Path, settings: Settings) -> None:
    with CheckpointSaver(live.accelerator) as saver:
        saver.save(live.model, folder / "saved", **settings)


def streaming(live: Live, folder: Path, settings: Settings) -> None:
    """Rank 0 holds a bucket of 1 MiB, three blocks of 8 MiB to write from, and its own shard, never the whole model."""
    with buckets_of(1 << 20), CheckpointSaver(live.accelerator, io_threads=1) as saver:
        saver.save(torch.nn.Linear(3, 3), folder / "warm-up")  # whatever is imported on first use is imported here
        extra = peak_memory(lambda: saver.save(live.model, folder / "saved", **settings))
    whole = sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(live.model))
    assert whole > 110 << 20, whole
    assert extra < whole / 3, f"{extra >> 20} MiB more than at rest for a model of {whole >> 20} MiB"
    saver = CheckpointSaver(live.accelerator, each_rank_writes="off", io_threads=1)
    with buckets_of(48 << 20), saver:
        extra = peak_memory(lambda: saver.save(live.model, folder / "again", **settings))
    assert extra < (48 + 32) << 20, f"{extra >> 20} MiB more than at rest with a bucket of 48 MiB and 24 of blocks"
    growing = sorted(
        ModelTensors(live.model).sources().values(), key=lambda source: source.size_bytes
    )  # sorted, so that their buckets grow, too
    with buckets_of(6 << 20):
        places = {chunk.data.untyped_storage().data_ptr() for chunk in stream_chunks(growing, current_ranks())}
    assert len(places) == (harness.RANK == 0), f"{len(places)} buffers: a chunk in use keeps the smaller ones alive"
    write_truth(live, folder)


SPECIAL = {"untouched": untouched, "after_eval": after_eval, "adapter_bytes": adapter_bytes, "streaming": streaming}


def case(name: str, folder: Path) -> None:
    wrapper, what = name.split("/")
    model, settings = SAVES[what]
    SPECIAL.get(what, plain_save)(live_model(wrapper, model), folder, dict(settings))


if __name__ == "__main__":
    torch.manual_seed(0)
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif harness.WORLD > 1:
        dist.init_process_group("gloo")
    harness.run(case)
