"""Two ranks on two clients of one network file system: full saves under FSDP2, resumes under DDP.

FT_CKPT_BENCH_CLIENTS names two mounts of one file system, with a colon between them. Each rank gets
one of them at the same path, in a namespace of mounts of its own, which needs root. On one machine
clients and server share the processors and the disk.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_ckpt import CheckpointSaver
from scripts.bench.common import ROOT, Row, Setting, as_child, medians, seconds, sync_tree
from scripts.bench.models import make_model
from scripts.bench.ranks import make_accelerator

SAVE_TITLE = "a full save under FSDP2, 2 ranks, each with a client of a network disk"
LOAD_TITLE = "a resume under DDP, 2 ranks, each with a client of a network disk"
CLIENTS = "FT_CKPT_BENCH_CLIENTS"
RANKS = 2
# mounts a client at a path, in a namespace of its own, and runs the rest of the command
_BIND = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
Action = Callable[[], Any]


def measure_save(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save all weights, of `size_bytes`."""
    return _on_clients(setting, "save", size_bytes)


def measure_load(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to resume with weights of `size_bytes`, after the files were saved."""
    return _on_clients(setting, "load", size_bytes)


def _on_clients(setting: Setting, action: str, size_bytes: int) -> list[Row]:
    """Measure "save" or "load" on ranks that have a mount each; rank 0 writes the rows."""
    mounts = os.environ.get(CLIENTS, "").split(":")
    if len(mounts) != RANKS:
        return [{"way": "ours", "error": f"{CLIENTS} names no {RANKS} mounts of one file system"}]
    point = setting.folder / "disk"
    point.mkdir()
    call = json.dumps([setting.rounds, str(setting.folder), setting.ways, action, size_bytes])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    environment |= {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank, mount in enumerate(mounts):
        namespace = ["unshare", "--mount", "--propagation=private", "sh", "-c", _BIND, "sh"]
        command = [*namespace, mount, point, sys.executable, "-m", "scripts.bench.clients", call]
        variables = {**environment, "RANK": str(rank), "LOCAL_RANK": "0"}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=variables))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"clients: the ranks ended with status {codes}")
    result = setting.folder / "clients.json"
    rows: list[Row] = json.loads(result.read_text())
    result.unlink()
    return rows


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure_on_rank(setting: Setting, action: str, size_bytes: int) -> list[Row]:
    """Measure all ways, on each rank."""
    folder = setting.folder / "disk" / "bench"
    model = make_model(size_bytes // 4, torch.float32)
    tensor_bytes = sum(parameter.nbytes for parameter in model.parameters())
    rows = (_saves if action == "save" else _loads)(setting, model, folder)
    return [row | {"tensor_bytes": tensor_bytes} for row in rows]


def _saves(setting: Setting, model: torch.nn.Module, folder: Path) -> list[Row]:
    accelerator = make_accelerator()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    sharing = CheckpointSaver(accelerator, each_rank_writes="on")
    gathering = CheckpointSaver(accelerator, each_rank_writes="off")

    def save_pretrained(path: Path) -> None:
        state = accelerator.get_state_dict(prepared)
        if accelerator.is_main_process:
            accelerator.unwrap_model(prepared).save_pretrained(path, state_dict=state)
            sync_tree(path)

    ways: dict[str, Callable[[Path], Any]] = {
        "ours": partial(sharing.save, prepared),
        "ours, rank 0 writes": partial(gathering.save, prepared),
        "get_state_dict + save_pretrained": save_pretrained,
    }
    actions = {name: partial(save, folder) for name, save in ways.items()}
    rows = _in_turns(actions, setting, before=partial(_delete, folder))
    _delete(folder)
    accelerator.end_training()
    return rows


def _loads(setting: Setting, model: torch.nn.Module, folder: Path) -> list[Row]:
    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters())
    with CheckpointSaver(None, folder) as saver:
        saver.register(model=wrapped, optimizer=optimizer)
        saver.save_state()

    def resume(fan_out: str) -> None:
        with CheckpointSaver(None, folder, fan_out=fan_out) as saver:
            saver.resume("must", model=wrapped, optimizer=optimizer)

    ways: dict[str, Action] = {
        "ours, each rank reads": partial(resume, "read"),
        "ours, rank 0 reads and sends": partial(resume, "broadcast"),
    }
    rows = _in_turns(ways, setting, before=_drop_caches)
    _delete(folder)
    dist.destroy_process_group()
    return rows


def _in_turns(ways: dict[str, Action], setting: Setting, before: Action) -> list[Row]:
    """Run the ways in rounds as `common.in_turns` does; all ranks begin and end together."""
    rows_by_way: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(setting.rounds + 1):
        for name, action in ways.items():
            before()
            dist.barrier()

            def until_all_end(action: Action = action) -> None:
                action()
                dist.barrier()

            rows_by_way[name].append({"seconds": seconds(until_all_end)})
    return [{"way": name, **medians(rows[1:])} for name, rows in rows_by_way.items()]


def _delete(folder: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()


def _drop_caches() -> None:
    """Take all files out of the page cache of this machine, so that clients ask the server."""
    if dist.get_rank() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    dist.barrier()


if __name__ == "__main__":
    as_child("clients", measure_on_rank)
