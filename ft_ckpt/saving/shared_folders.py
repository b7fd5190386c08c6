"""Which folders all ranks see, tried with a file of rank 0."""

import uuid
from pathlib import Path

from ft_ckpt.errors import CorruptError
from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage import LocalStore, Store

_PROBE = ".ft_ckpt-probe"


class SharedFolders:
    """Cache of which folders are visible to every rank; cleared after a failed save."""

    def __init__(self) -> None:
        self._is_seen: dict[str, bool] = {}  # by URL

    def is_seen_by_all(self, folder: Store, ranks: Ranks, probed: Store | None = None) -> bool:
        """Whether all ranks see files that rank 0 creates in `folder`. Collective.

        The probe file is created there, or in `probed` below it.
        """
        if folder.url not in self._is_seen:
            self._is_seen[folder.url] = ranks.size == 1 or all_ranks_see(probed or folder, ranks)
        return self._is_seen[folder.url]

    def forget(self) -> None:
        self._is_seen.clear()


def all_ranks_see(store: Store, ranks: Ranks) -> bool:
    """Whether all ranks see files that rank 0 creates in `store`, tested with a probe file.
    Collective.

    Raises the error of rank 0 on all ranks if it cannot write there.
    """
    token = uuid.uuid4().hex
    name = f"{_PROBE}-{token}"
    _, error = try_action(lambda: store.write(name, token.encode()) if ranks.is_main else None)
    probe = ranks.agree(
        "the files of save()", {"folder": store.url, "name": name, "token": token}, error
    ).result
    probed = store if store.local_folder is None else LocalStore(Path(probe["folder"]))

    def look() -> dict[str, bool]:
        try:
            return {"sees": probed.read(probe["name"]) == probe["token"].encode()}
        except CorruptError:  # absent, or another file
            return {"sees": False}

    seen, error = try_action(look)
    try:
        agreed = ranks.agree("the look at the files of save()", seen, error, decide=_all_see)
    finally:
        if ranks.is_main:
            store.delete([name])
    return bool(agreed.result)


def _all_see(values: Values) -> bool:
    return all(value["sees"] for value in values)
