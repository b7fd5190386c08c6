"""The answers of models to the same prompts: lists of log probabilities.

`reference` computes those that a server should give.
"""

import math

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines.server import Server

Answers = list[list[float]]

# token ids in every vocabulary
PROBE_PROMPTS = ((3, 5, 7, 11, 13), (2, 9, 4, 16, 8), (17, 6, 1, 10, 12))
_TOP = 5  # tokens whose log probabilities are compared; servers return 5 by default
EQUAL_WITHIN = 1e-4  # log probabilities that differ by less count as equal
# error of log probabilities in bfloat16, against a reference in float32; the base's may double it
ROUNDING = 0.1


def probe(server: Server, model: str) -> Answers:
    """Request the highest log probabilities of the first token after each of PROBE_PROMPTS.

    The largest come first.
    """
    answers = []
    for prompt in PROBE_PROMPTS:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": _TOP,
        }
        answer = server.client.expect(
            server.client.post("/v1/completions", body), f"a completion by {model!r}"
        )
        try:
            top = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
            numbers = sorted(map(float, top.values()), reverse=True)[:_TOP]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):  # every comparison with NaN passes
            raise EngineError(
                f"{server.client.url}: a completion by {model!r} has no finite log probabilities: "
                f"{answer.quoted}"
            )
        answers.append(numbers)
    return answers


def distance(answers: Answers, reference: Answers) -> float:
    """Return the largest difference of log probabilities, over as many as both have."""
    largest = 0.0
    for probabilities, expected in zip(answers, reference, strict=True):
        for probability, expectation in zip(probabilities, expected, strict=False):
            largest = max(largest, abs(probability - expectation))
    return largest
