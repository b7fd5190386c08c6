"""Writers in Ray actors, on a local Ray."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest

from ft_ckpt import CheckpointSaver

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_an_actor_hands_in_its_state_and_gets_it_back(cluster: None, tmp_path: Path) -> None:
    class Replay:  # here, so that Ray sends it by value
        def __init__(self, run: str, session: str) -> None:
            from ft_ckpt import Writer

            self.writer = Writer(run, "replay", session=session)
            part = self.writer.resume()
            self.samples: list[int] = part.state if part else []
            self.writer.provide(lambda: list(self.samples))

        def add(self, *samples: int) -> list[int]:
            self.samples += samples
            return self.samples

    actor: Any = ray.remote(Replay)
    for life, expected in ((1, [1, 2]), (2, [1, 2, 1, 2])):
        with CheckpointSaver(None, tmp_path / "run") as saver:
            saver.register(model=models.build("partly_frozen"))
            assert saver.resume().step == life - 1
            replay = actor.remote(str(tmp_path / "run"), saver.invite("replay", timeout_seconds=60))
            assert ray.get(replay.add.remote(1, 2)) == expected
            saver.step(step=life)
            assert saver.save_state().step == life
            ray.kill(replay)  # as a node that is lost
