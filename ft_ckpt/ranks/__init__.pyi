from .agreement import (
    Values as Values,
    rank_numbers as rank_numbers,
    runs_of as runs_of,
    values_of_runs as values_of_runs,
)
from .launched import (
    launch_of_process as launch_of_process,
    launched_ranks as launched_ranks,
)
from .ranks import (
    Outcome as Outcome,
    Ranks as Ranks,
    by_itself as by_itself,
    current_ranks as current_ranks,
    try_action as try_action,
)
from .tensor_names import (
    name_differing_tensors as name_differing_tensors,
)
