"""Every file of configs/ is read by Accelerate, and means to its launcher what its name says."""

import json
import subprocess
import sys
from functools import partial

import accelerate.commands.launch as accelerate_launch
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from launch import launch
from places import ROOT

CONFIGS = ROOT / "configs"

#            file        distributed type          processes  on the CPU  mixed precision
EXPECTED = {
    "cpu": (DistributedType.NO, 1, True, "no"),
    "ddp_cpu": (DistributedType.MULTI_GPU, 2, True, "no"),
    "ddp_gpu": (DistributedType.MULTI_GPU, 8, False, "bf16"),
    "fsdp2": (DistributedType.FSDP, 8, False, "bf16"),
    "zero2": (DistributedType.DEEPSPEED, 8, False, "bf16"),
    "zero3": (DistributedType.DEEPSPEED, 8, False, "bf16"),
}

RANKS = """
import os
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
rank, count = accelerator.process_index, accelerator.num_processes
line = f"{rank} {count} {accelerator.device.type} {ranks.tolist()}"
os.write(1, f"{line}\\n".encode())  # in one piece, since two ranks write to the same pipe
accelerator.wait_for_everyone()
os._exit(0)  # gloo's threads sometimes take the process down when the interpreter ends
"""


def launched(config, script, folder, *options):
    """What a script prints when Accelerate launches it with a config."""
    path = folder / "script.py"
    path.write_text(script)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{config}.yaml"),
    ]
    result = subprocess.run(
        [*command, *options, str(path)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_every_config_is_known_here():
    assert {path.stem for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_config_says_what_its_name_says(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    found = (config.distributed_type, config.num_processes, config.use_cpu, config.mixed_precision)
    assert found == EXPECTED[name]
    assert config.num_machines == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("cpu", 1), ("ddp_cpu", 2)])
def test_launch_on_the_cpu_makes_ranks_that_know_each_other(name, ranks, tmp_path):
    lines = launched(name, RANKS, tmp_path)
    assert sorted(lines) == [f"{rank} {ranks} cpu {list(range(ranks))}" for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp2", [2, "transformer_auto_wrap_policy", True, False]),
        ("zero2", [2, 1.0, False, False]),
        ("zero3", [3, 1.0, True, True]),
    ],
)
def test_settings_reach_the_plugin(name, expected, monkeypatch):
    """The launcher stops where it would start processes; the plugin is made in one that has what it
    would have set.
    """
    asked = {}
    for kind in ("deepspeed_launcher", "multi_gpu_launcher"):
        monkeypatch.setattr(accelerate_launch, kind, partial(asked.__setitem__, kind))
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--num_processes", "1", "script.py"]
    accelerate_launch.launch_command(accelerate_launch.launch_command_parser().parse_args(words))
    ((kind, settings),) = asked.items()
    if kind == "deepspeed_launcher":
        _, environment = accelerate_launch.prepare_deepspeed_cmd_env(settings)
    else:
        environment = accelerate_launch.prepare_multi_gpu_env(settings)
    result = launch("plugin", 1, [kind], env={**environment, "DS_ACCELERATOR": "cpu"})
    assert result.returncode == 0, result.log
    assert json.loads(result.log.splitlines()[-1]) == expected
