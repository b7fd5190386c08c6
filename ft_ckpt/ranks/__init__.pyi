from .agreement import (
    Values as Values,
    rank_numbers as rank_numbers,
    runs_of as runs_of,
    values_of_runs as values_of_runs,
)
from .current import (
    by_itself as by_itself,
    current_ranks as current_ranks,
)
from .launched import (
    launch_of_process as launch_of_process,
    launched_ranks as launched_ranks,
)
from .outcomes import (
    Outcome as Outcome,
    try_action as try_action,
)
from .ranks import (
    Ranks as Ranks,
)
from .tensor_names import (
    name_differing_tensors as name_differing_tensors,
)
