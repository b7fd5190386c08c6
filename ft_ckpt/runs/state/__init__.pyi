from .capture import (
    Captured as Captured,
    assemble_state as assemble_state,
    capture_run as capture_run,
)
from .document import (
    FOLDER as FOLDER,
    Document as Document,
    entries_of_rank as entries_of_rank,
    read_document as read_document,
)
from .exchange import (
    LocalState as LocalState,
    exchange_descriptions as exchange_descriptions,
    local_state as local_state,
)
from .fingerprint import (
    fingerprint_differences as fingerprint_differences,
    run_fingerprint as run_fingerprint,
)
from .gradients import (
    StepWatch as StepWatch,
    restore_gradients as restore_gradients,
)
from .outcomes import (
    Restored as Restored,
    RestoreReport as RestoreReport,
    agree_on_outcomes as agree_on_outcomes,
    not_restored as not_restored,
)
from .rank_state import (
    capture_rank_state as capture_rank_state,
    is_synced as is_synced,
    read_rank_state as read_rank_state,
    restore_rank_state as restore_rank_state,
)
from .stored_tensors import (
    StoredTensors as StoredTensors,
    tree_of as tree_of,
)
from .trees import (
    flatten_tree as flatten_tree,
)
