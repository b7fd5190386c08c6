"""Items that a resume may leave unrestored."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ft_ckpt.errors import ConfigError, LoadError, listing
from ft_ckpt.messages import did_you_mean
from ft_ckpt.runs.state import Restored, RestoreReport
from ft_ckpt.values import as_names

HALF_RESTORED = "parts of the run are overwritten: make its objects again before another resume()"
# items that are not objects of a run
_NOT_OBJECTS = ("adapter settings", "base", "data", "gradients", "rng")


class AllowedItems:
    """The items that may stay unrestored, by the argument `allow` of a resume."""

    def __init__(self, allow: Iterable[str] | bool) -> None:
        """Parse `allow`: names, True (any item) or False (none). Raises ConfigError otherwise."""
        self._allows_any = allow is True
        try:
            names = as_names(() if isinstance(allow, bool) else allow, "resume(allow=...)")
        except ConfigError as error:
            raise ConfigError(f"{error}, or True for any") from None
        self._names = frozenset(names)

    def refuse_unknown(self, names: Collection[str], outcomes: Iterable[Restored]) -> None:
        """Raise ConfigError for allowed names of no item: `names`, and those of the `outcomes`."""
        items = {*_NOT_OBJECTS, *names, *(outcome.name for outcome in outcomes)} - {"weights"}
        unknown = sorted(self._names - items)
        if unknown:
            question = did_you_mean(unknown, items)
            raise ConfigError(
                f"resume(allow=...): {listing([repr(name) for name in unknown], ', ')}: no such "
                f"item; there are {listing(sorted(items), ', ', 20)}{'; ' if question else ''}"
                f"{question}"
            )

    def refuse_unrestored(
        self, path: Path | str, outcomes: Sequence[Restored], effect: str
    ) -> None:
        """Raise LoadError naming each item that was not restored and must be."""
        if self._allows_any:
            return
        required = tuple(outcome for outcome in outcomes if outcome.name not in self._names)
        problems = RestoreReport(items=required).problems
        if problems:
            raise LoadError(
                f"{path}: {listing(problems)}. Pass the same objects as the saved run, or "
                f"resume(allow=[names]) to go on without; {effect}"
            )
