from .agree import (
    report_differences as report_differences,
)
from .background import (
    SaveRunner as SaveRunner,
    as_in_training as as_in_training,
)
from .commit_files import (
    library_versions as library_versions,
)
from .context import (
    SaveContext as SaveContext,
)
from .execute import (
    Attempt as Attempt,
    run_save as run_save,
)
from .folder_sharing import (
    FolderSharing as FolderSharing,
    SharedFolders as SharedFolders,
    try_sharing as try_sharing,
)
from .range_trial import (
    try_ranges as try_ranges,
)
