"""The seed of a random test, printed so that the run can be repeated: FT_CKPT_SEED."""

import os


def chosen_seed() -> int:
    """The seed of this test."""
    seed = int(os.environ["FT_CKPT_SEED"])
    print(f"FT_CKPT_SEED={seed}")
    return seed
