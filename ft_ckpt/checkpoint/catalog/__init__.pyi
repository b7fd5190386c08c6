from .catalog import (
    CheckpointInfo as CheckpointInfo,
    EarlierCheckpoint as EarlierCheckpoint,
    Listing as Listing,
    discover as discover,
    earlier_checkpoints as earlier_checkpoints,
    in_run_order as in_run_order,
    list_checkpoints as list_checkpoints,
    list_readable as list_readable,
    run_checkpoints as run_checkpoints,
)
from .metrics import (
    METRIC as METRIC,
    check_metric as check_metric,
)
from .selection import (
    best as best,
    find_best as find_best,
    find_latest as find_latest,
    latest as latest,
)
