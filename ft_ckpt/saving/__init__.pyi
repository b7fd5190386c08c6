from .agree import (
    report_differences as report_differences,
)
from .background import (
    PendingSave as PendingSave,
    SaveRunner as SaveRunner,
    as_in_training as as_in_training,
)
from .execute import (
    run_save as run_save,
)
from .replicas import (
    describe_differences as describe_differences,
    differing_settings as differing_settings,
)
from .report import (
    SaveReport as SaveReport,
)
from .request import (
    SaveRequest as SaveRequest,
    request_of as request_of,
)
from .save_manifest import (
    library_versions as library_versions,
)
from .shared_folders import (
    SharedFolders as SharedFolders,
)
from .sidecars import (
    check_companions as check_companions,
)
