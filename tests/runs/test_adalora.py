"""AdaLoRA decides on ranks by scores of the whole run, which are in no state dict."""

from itertools import pairwise

import models
import pytest
import torch
from peft import AdaLoraConfig, get_peft_model

from ft_ckpt import CheckpointSaver, errors

SETTINGS = {"init_r": 6, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 1, "total_step": 12}


def make():
    torch.manual_seed(0)
    config = AdaLoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **SETTINGS)
    model = models.trained(get_peft_model(models.build("qwen3"), config))
    return model, torch.optim.AdamW(
        (one for one in model.parameters() if one.requires_grad), lr=1e-2
    )


def train(model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        losses.append(model(**models.batch(step)).loss)
        losses[-1].backward()
        optimizer.step()
        model.base_model.update_and_allocate(step + 1)
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


STOPS = [1, 5, 10]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run, and the checkpoints of another at the stops."""
    expected = train(*make(), 0, 12)
    folder = tmp_path_factory.mktemp("adalora")
    model, optimizer = make()
    saver = CheckpointSaver()
    losses = []
    for first, stop in pairwise([0, *STOPS, 12]):
        losses += train(model, optimizer, first, stop)
        saver.save_state(model, folder / str(stop), optimizer=optimizer)
    assert losses == expected
    return expected, folder


@pytest.mark.parametrize("stop", STOPS)
def test_ranks_are_given_as_without_a_stop(stop, whole):
    losses, folder = whole
    model, optimizer = make()
    CheckpointSaver().resume(folder / str(stop), model=model, optimizer=optimizer)
    assert train(model, optimizer, stop, 12) == losses[stop:]


def test_a_checkpoint_without_the_scores_is_named(tmp_path):
    model, _ = make()
    allocator, model.base_model.rankallocator = model.base_model.rankallocator, None
    CheckpointSaver().save_state(model, tmp_path / "out")
    model.base_model.rankallocator = allocator
    with pytest.raises(errors.LoadError, match="AdaLoRA's ranks"):
        CheckpointSaver().resume(tmp_path / "out", model=model)
