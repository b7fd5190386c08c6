"""Reference answers of transformers and PEFT, to compare with those of a server."""

from pathlib import Path
from typing import Any

import torch

from ft_ckpt.extensions.rl.engines.answers import PROBE_PROMPTS, Answers
from ft_ckpt.model.load import load_model

_TOP = 5


def reference_answers(checkpoint: Path, part: str, base: Any) -> tuple[Answers, Answers]:
    """Compute the answers of the base, and those with the adapter `part` of the checkpoint.

    An answer is the list of the highest log probabilities after one of PROBE_PROMPTS. They are
    computed in float32 on the CPU. Raises the errors of `load_model`.
    """
    model = load_model(checkpoint, part=part or None, base=base).float().eval()
    with model.disable_adapter():
        base_answers = _answers(model)
    return base_answers, _answers(model)


def model_answers(checkpoint: Path, part: str) -> Answers:
    """Compute the answers of the model `part` of the checkpoint, as `reference_answers` does."""
    return _answers(load_model(checkpoint, part=part or None).float().eval())


@torch.no_grad()
def _answers(model: Any) -> Answers:
    answers = []
    for prompt in PROBE_PROMPTS:
        logits = model(input_ids=torch.tensor([prompt], device="cpu")).logits[0, -1]
        answers.append(torch.log_softmax(logits.float(), -1).topk(_TOP).values.tolist())
    return answers
