"""The seed of a random test: any, printed so that the run can be repeated, or the one in FT_CKPT_SEED."""

import os
import random


def chosen_seed() -> int:
    """The seed of this test."""
    seed = int(os.environ.get("FT_CKPT_SEED", random.randrange(10**6)))
    print(f"FT_CKPT_SEED={seed}")
    return seed
