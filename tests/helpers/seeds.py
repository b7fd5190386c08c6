"""The seed of a random test (FT_CKPT_SEED), and how many examples it takes."""

import os

from hypothesis import HealthCheck, Phase, settings


def chosen_seed() -> int:
    """The seed of this test."""
    seed = int(os.environ["FT_CKPT_SEED"])
    print(f"FT_CKPT_SEED={seed}")
    return seed


def examples(count: int) -> int:
    """Examples of a property-based test: all with a seed other than 0, else a quarter (at least 5),
    always the same.
    """
    return count if os.environ["FT_CKPT_SEED"] != "0" else max(count // 4, 5)


def machine_settings(max_examples: int) -> settings:
    """Settings of a state machine.

    A failure is made shorter with a seed other than 0 only: that takes minutes.
    """
    phases = (
        [Phase.generate] if os.environ["FT_CKPT_SEED"] == "0" else [Phase.generate, Phase.shrink]
    )
    return settings(
        max_examples=max_examples,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
