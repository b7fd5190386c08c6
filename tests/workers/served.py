"""Publishing by a saver on several ranks: rank 0 publishes, and all learn the outcome."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from engine_models import base_model, tokenizer, with_adapter
from engine_server import Engine, serving

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import EngineError, RankError


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, Engine | None]]:
    """A server in the process of rank 0: its URL on every rank, and itself on rank 0."""
    with CheckpointSaver(tokenizer=tokenizer()) as saver:
        saver.save(base_model("llama"), folder / "base")
    with serving(folder / "base") if harness.RANK == 0 else nullcontext() as engine:
        urls = [engine.url if engine else ""]
        dist.broadcast_object_list(urls)
        yield urls[0], engine
        dist.barrier()


@harness.named
def saver_publish(folder: Path) -> None:
    """The report is rank 0's; an error is raised on all ranks."""
    with server(folder) as (url, engine), CheckpointSaver(directory=folder / "run") as saver:
        report = saver.publish(with_adapter(base_model("llama"), 1), url, step=1, name="policy")
        assert (report is not None) == (harness.RANK == 0)
        if engine is not None:
            assert report is not None
            assert [*engine.adapters] == [report.name]
            engine.fail("/v1/load_lora_adapter", 500)
        dist.barrier()
        with pytest.raises(EngineError if harness.RANK == 0 else RankError, match="EngineCore encountered an issue"):
            saver.publish(with_adapter(base_model("llama"), 2), url, step=2, name="policy")


@harness.named
def setting(folder: Path) -> None:
    """Rank 0 publishes the checkpoints of a run, and again after the server has restarted."""
    with server(folder) as (url, engine):
        for attempt in (1, 2):
            model = with_adapter(base_model("llama").float(), 1)
            optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
            goal = {"url": url, "name": "policy"}
            with CheckpointSaver(directory=folder / "run", publish=goal) as saver:
                saver.register(model=model, optimizer=optimizer)
                assert saver.resume().step == attempt - 1
                if engine is not None:
                    assert [name.partition("-")[0] for name in engine.adapters] == ["policy@1"] * (attempt - 1)
                saver.step(step=1)
                report = saver.save_state()
                assert (report.publish is not None) == (harness.RANK == 0)
            if engine is not None:
                engine.start()
            dist.barrier()


def case(name: str, folder: Path) -> None:
    harness.NAMED[name](folder)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
