"""Compares answers to the prompts of `servers.probe`: lists of log probabilities."""

Answers = list[list[float]]

EQUAL_WITHIN = 1e-4  # log probabilities that differ by less count as equal
# error of log probabilities in bfloat16, against a reference in float32; the base's may double it
ROUNDING = 0.1


def distance(answers: Answers, reference: Answers) -> float:
    """The largest difference of log probabilities, over as many as both have."""
    largest = 0.0
    for probabilities, expected in zip(answers, reference, strict=True):
        for probability, expectation in zip(probabilities, expected, strict=False):
            largest = max(largest, abs(probability - expectation))
    return largest
