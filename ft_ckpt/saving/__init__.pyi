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
