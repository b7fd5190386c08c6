"""Run an example script as it is, or under an engine that needs GPUs, on the CPU.

`example.py ddp|fsdp2|zero3 SCRIPT ARGUMENTS...`
"""

import runpy
import sys
from pathlib import Path

import models
from wrappers import deepspeed_accelerator, fsdp_accelerator

engine, script, *arguments = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))

import common  # noqa: E402  lies beside the script

if engine != "ddp":
    make = {"fsdp2": fsdp_accelerator(2), "zero3": deepspeed_accelerator(3)}[engine]
    common.make_accelerator = lambda: make(models.olmo2())

sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
