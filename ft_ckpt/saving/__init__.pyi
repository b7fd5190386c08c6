from .agree import (
    report_differences as report_differences,
)
from .background import (
    SaveRunner as SaveRunner,
    as_in_training as as_in_training,
)
from .context import (
    SaveContext as SaveContext,
)
from .execute import (
    Attempt as Attempt,
    run_save as run_save,
)
from .replicas import (
    Differences as Differences,
    describe_differences as describe_differences,
    difference_note as difference_note,
)
from .report import (
    PendingSave as PendingSave,
    SaveReport as SaveReport,
)
from .request import (
    STATE_DOCUMENT as STATE_DOCUMENT,
    ExtraState as ExtraState,
    SaveRequest as SaveRequest,
    request_of as request_of,
)
from .save_manifest import (
    library_versions as library_versions,
)
