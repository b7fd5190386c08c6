"""Reads and applies rules that divide tensors between several TensorFlow checkpoints.

A rule is a line "pattern shard", such as "encoder.* encoder".
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ft_ckpt.errors import ConfigError, SelectionError, listing
from ft_ckpt.extensions.tools.converting.rename_rules import split_lines
from ft_ckpt.formats import Spec
from ft_ckpt.storage import read_text
from ft_ckpt.storage.places import open_place

ShardRule = tuple[str, str]  # (shell pattern of tensor names, shard for the names that match)
_SHARD = re.compile(r"\w[\w.-]*")


def read_shard_rules(source: str | Path | None) -> tuple[ShardRule, ...]:
    """Read the rules in a file, in which # begins a comment.

    Raises ConfigError for a file with other lines, or without a rule.
    """
    if source is None:
        return ()
    place = open_place(source)
    rules: list[ShardRule] = []
    wrong = []
    for words in split_lines(read_text(place.store, place.name)):
        if len(words) == 2 and _SHARD.fullmatch(words[1]):
            rules.append((words[0], words[1]))
        else:
            wrong.append(" ".join(words))

    if wrong or not rules:
        raise ConfigError(
            f"{source}: {listing(wrong) or 'no rule'}: expected a pattern and the name of a shard, "
            "of letters, digits, '.', '_' and '-', in each line"
        )

    return tuple(rules)


def assign_shards(specs: Sequence[Spec], rules: Sequence[ShardRule]) -> dict[str, list[Spec]]:
    """Return the tensors of each shard. The first rule that matches a name decides.

    Raises SelectionError naming tensors that match no rule, and rules without a tensor.
    """
    shards: dict[str, list[Spec]] = {shard: [] for _, shard in rules}
    used = set()
    problems = []
    for spec in specs:
        rule = next((rule for rule in rules if fnmatchcase(spec.name, rule[0])), None)
        if rule is None:
            problems.append(f"{spec.name}: in no shard")
            continue
        used.add(rule)
        shards[rule[1]].append(spec)

    for pattern, shard in rules:
        if (pattern, shard) not in used:
            problems.append(f"{pattern} {shard}: a rule for no tensor")

    if problems:
        raise SelectionError(
            f"{listing(problems)}; end the rules with '* NAME' for all that is left"
        )

    return shards
