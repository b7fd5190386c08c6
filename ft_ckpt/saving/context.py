"""The context that all steps of a save share: ranks, settings, start time."""

import time
from dataclasses import dataclass, field

from ft_ckpt.config import SaverConfig
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving.folder_sharing import SharedFolders


@dataclass(frozen=True, eq=False)
class SaveContext:
    """The ranks and settings of a save, and when it was called.

    Attributes:
        ranks: The ranks that save together.
        config: The settings.
        begun: The value of `time.monotonic` at the call.
        shared_folders: How ranks share the files of folders. All saves of a saver have one cache.
    """

    ranks: Ranks
    config: SaverConfig
    begun: float = field(default_factory=time.monotonic)
    shared_folders: SharedFolders = field(default_factory=SharedFolders)
