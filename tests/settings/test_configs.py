"""Every file of configs/ is read by Accelerate, and means to its launcher what its name says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
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
line = f"{accelerator.process_index} {accelerator.num_processes} {accelerator.device.type} {ranks.tolist()}"
os.write(1, f"{line}\\n".encode())  # in one piece, since two ranks write to the same pipe
accelerator.wait_for_everyone()
os._exit(0)  # gloo's threads sometimes take the process down when the interpreter ends
"""

FSDP = """
import json
from accelerate import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
policy = getattr(plugin.auto_wrap_policy, "__name__", None)
print(json.dumps([plugin.fsdp_version, policy, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading]))
"""

DEEPSPEED = """
import json
from accelerate import DeepSpeedPlugin
plugin = DeepSpeedPlugin()
zero = plugin.deepspeed_config["zero_optimization"]
gather = zero.get("stage3_gather_16bit_weights_on_model_save")
print(json.dumps([plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag, gather]))
"""


def launched(config, script, folder, *options):
    """What a script prints when Accelerate launches it with a config."""
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    result = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, timeout=100)
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


@pytest.mark.parametrize(("name", "ranks"), [("cpu", 1), ("ddp_cpu", 2)])
def test_launch_on_the_cpu_makes_ranks_that_know_each_other(name, ranks, tmp_path):
    lines = launched(name, RANKS, tmp_path)
    assert sorted(lines) == [f"{rank} {ranks} cpu {list(range(ranks))}" for rank in range(ranks)]


def test_fsdp2_reaches_the_plugin(tmp_path):
    *_, line = launched("fsdp2", FSDP, tmp_path, "--num_processes", "1")
    assert json.loads(line) == [2, "transformer_auto_wrap_policy", True, False]


@pytest.mark.parametrize(("name", "expected"), [("zero2", [2, 1.0, False, False]), ("zero3", [3, 1.0, True, True])])
def test_zero_reaches_the_plugin(name, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    *_, line = launched(name, DEEPSPEED, tmp_path, "--num_processes", "1")
    assert json.loads(line) == expected
