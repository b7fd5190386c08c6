"""The context that all steps of a save share: ranks, settings, start time."""

import time
from dataclasses import dataclass, field

from ft_ckpt.config import SaverConfig
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving.folder_sharing import SharedFolders


@dataclass(frozen=True, eq=False)
class SaveContext:
    """The ranks and settings of a save, and when it was called."""

    ranks: Ranks
    config: SaverConfig
    begun: float = field(default_factory=time.monotonic)  # time.monotonic() of the call
    shared: SharedFolders = field(default_factory=SharedFolders)  # cache of one saver
