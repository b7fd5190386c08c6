"""Prints what Accelerate's plugin makes of the environment that one of its launchers, named by the
argument, sets.
"""

import json
import sys

if sys.argv[1] == "multi_gpu_launcher":
    from accelerate import FullyShardedDataParallelPlugin

    fsdp = FullyShardedDataParallelPlugin()
    policy = getattr(fsdp.auto_wrap_policy, "__name__", None)
    print(
        json.dumps(
            [fsdp.fsdp_version, policy, fsdp.reshard_after_forward, fsdp.cpu_ram_efficient_loading]
        )
    )
else:
    from accelerate import DeepSpeedPlugin

    deepspeed = DeepSpeedPlugin()
    gather = deepspeed.deepspeed_config["zero_optimization"].get(
        "stage3_gather_16bit_weights_on_model_save"
    )
    print(
        json.dumps(
            [deepspeed.zero_stage, deepspeed.gradient_clipping, deepspeed.zero3_init_flag, gather]
        )
    )
