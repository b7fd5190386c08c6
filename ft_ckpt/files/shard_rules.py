"""Which tensors go to which shard: rules by name, one a line."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ft_ckpt.errors import ConfigError, SelectionError, listing
from ft_ckpt.formats.layout import Spec
from ft_ckpt.storage.place import open_place
from ft_ckpt.storage.store import read_text

ShardRule = tuple[str, str]  # a pattern of names, as the shell has them for files, and the shard of those that fit it
_SHARD = re.compile(r"\w[\w.-]*")


def read_shard_rules(source: str | Path | None) -> tuple[ShardRule, ...]:
    """The rules in a file of lines "pattern shard" (# begins a comment). Raises ConfigError when it is none."""
    if source is None:
        return ()
    place = open_place(source)
    text = read_text(place.store, place.name)
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    wrong = [" ".join(line) for line in lines if len(line) != 2 or not _SHARD.fullmatch(line[1])]
    if wrong or not lines:
        raise ConfigError(
            f"{source}: {listing(wrong) or 'no rule'}: expected a pattern and the name of a shard, of letters, digits, "
            "'.', '_' and '-', in each line"
        )
    return tuple((line[0], line[1]) for line in lines)


def assign_shards(specs: Sequence[Spec], rules: Sequence[ShardRule]) -> dict[str, list[Spec]]:
    """The tensors of each shard: each goes by the first rule that its name fits.

    Raises SelectionError naming tensors that fit none, and rules that no tensor goes by.
    """
    shards: dict[str, list[Spec]] = {shard: [] for _, shard in rules}
    used, lost = set(), []
    for spec in specs:
        rule = next((rule for rule in rules if fnmatchcase(spec.name, rule[0])), None)
        if rule is None:
            lost.append(f"{spec.name}: in no shard")
            continue
        used.add(rule)
        shards[rule[1]].append(spec)
    idle = [f"{pattern} {shard}: a rule for no tensor" for pattern, shard in rules if (pattern, shard) not in used]
    if lost or idle:
        raise SelectionError(f"{listing(lost + idle)}; end the rules with '* NAME' for all that is left")
    return shards
