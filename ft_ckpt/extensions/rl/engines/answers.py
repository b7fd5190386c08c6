"""Requests the answers of a server to fixed prompts, and compares answers.

An answer is the list of the highest log probabilities of the first token after a prompt.
`reference` computes the answers that a server should give.
"""

import math

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines.server import Server

Answers = list[list[float]]

# Token ids that every vocabulary has.
PROBE_PROMPTS = ((3, 5, 7, 11, 13), (2, 9, 4, 16, 8), (17, 6, 1, 10, 12))
_TOP = 5  # how many log probabilities are compared; servers return 5 by default
# Log probabilities that differ by less are equal.
EQUAL_WITHIN = 1e-4
# The error of log probabilities in bfloat16 against a reference in float32. The error of the base
# may double it.
ROUNDING = 0.1


def probe(server: Server, model: str) -> Answers:
    """Request the highest log probabilities of the first token after each of PROBE_PROMPTS.

    The largest come first. Raises EngineError if the server refuses, or for answers that are not
    finite.
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

        # NaN must not be compared, because it would pass each check for a large difference.
        if not all(map(math.isfinite, numbers)):
            raise EngineError(
                f"{server.client.url}: a completion by {model!r} has no finite log probabilities: "
                f"{answer.quoted}"
            )

        answers.append(numbers)

    return answers


def distance(answers: Answers, reference: Answers) -> float:
    """Return the largest difference of two log probabilities with the same prompt and rank.

    If one answer has more log probabilities than the other, the rest is ignored.
    """
    largest = 0.0
    for log_probs, reference_log_probs in zip(answers, reference, strict=True):
        for log_prob, reference_log_prob in zip(log_probs, reference_log_probs, strict=False):
            largest = max(largest, abs(log_prob - reference_log_prob))
    return largest
