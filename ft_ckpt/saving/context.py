"""What all steps of a save have in common."""

import time
from dataclasses import dataclass, field

from ft_ckpt.config import SaverConfig
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving.folder_sharing import SharedFolders


@dataclass(frozen=True, eq=False)
class SaveContext:
    """Who carries out a save, and by which settings."""

    ranks: Ranks
    config: SaverConfig
    begun: float = field(default_factory=time.monotonic)  # the moment of the call
    shared: SharedFolders = field(default_factory=SharedFolders)  # of all saves of one saver
