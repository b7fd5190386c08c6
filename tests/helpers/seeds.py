"""The seed of a random test (FT_CKPT_SEED), and how many examples it takes."""

import os

from hypothesis import HealthCheck, Phase, settings


def chosen_seed() -> int:
    """Return the seed of this test, and print it for its repetition."""
    seed = int(os.environ["FT_CKPT_SEED"])
    print(f"FT_CKPT_SEED={seed}")
    return seed


def examples(count: int) -> int:
    """Return the number of examples of a property-based test.

    It is `count` with a seed other than 0, else a quarter of it (at least 5), always the same ones.
    """
    return count if os.environ["FT_CKPT_SEED"] != "0" else max(count // 4, 5)


def machine_settings(max_examples: int) -> settings:
    """Return the settings of a state machine.

    A failure is made shorter with a seed other than 0 only: that takes minutes.
    """
    phases = [Phase.generate]
    if os.environ["FT_CKPT_SEED"] != "0":
        phases.append(Phase.shrink)
    return settings(
        max_examples=max_examples,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
