from .agreement import (
    Values as Values,
    rank_numbers as rank_numbers,
    runs_of as runs_of,
    values_of_runs as values_of_runs,
)
from .fill import (
    Filler as Filler,
    WantedTensor as WantedTensor,
    check_all as check_all,
    choose_filler as choose_filler,
    each_reads as each_reads,
    fill_all as fill_all,
    fill_tensor as fill_tensor,
    is_first_process as is_first_process,
    readers_here as readers_here,
)
from .gather import (
    Chunk as Chunk,
    are_equal as are_equal,
    gather_tensors as gather_tensors,
    moves_to as moves_to,
    stream_buckets as stream_buckets,
    wire_device as wire_device,
)
from .module_state import (
    refuse_one_way_state as refuse_one_way_state,
    wrapper_steps as wrapper_steps,
)
from .ranks import (
    Outcome as Outcome,
    Ranks as Ranks,
    by_itself as by_itself,
    current_ranks as current_ranks,
    global_rank as global_rank,
    is_subset_of_ranks as is_subset_of_ranks,
    ranks_in_order as ranks_in_order,
    try_action as try_action,
)
from .replicas import (
    WEIGHTS as WEIGHTS,
    elements_at as elements_at,
    has_readable_elements as has_readable_elements,
    place_of as place_of,
    sample_elements as sample_elements,
)
from .sharding import (
    FlatSharding as FlatSharding,
    OwnedSharding as OwnedSharding,
    ReplicatedSharding as ReplicatedSharding,
    Sharding as Sharding,
    is_known_to_all as is_known_to_all,
)
from .source import (
    Source as Source,
    held_source as held_source,
)
from .tensor_digests import (
    digests_of as digests_of,
)
from .tensor_names import (
    name_differing_tensors as name_differing_tensors,
)
from .tensors import (
    ModelTensors as ModelTensors,
    engine_names as engine_names,
    from_state_dict as from_state_dict,
    of_rank_0 as of_rank_0,
    source_of_tensor as source_of_tensor,
)
from .wrapper import (
    TensorLayout as TensorLayout,
    Wrapper as Wrapper,
    give_memory as give_memory,
    layout_like as layout_like,
    stand_in_parameter as stand_in_parameter,
)
from .wrappers import (
    hides_tensors as hides_tensors,
    is_distributed as is_distributed,
    is_engine_attribute as is_engine_attribute,
    keeps_weights as keeps_weights,
    layout_of as layout_of,
    layouts_of as layouts_of,
    optimizer_parameter as optimizer_parameter,
    shallow_copy as shallow_copy,
    shows_runs as shows_runs,
    state_run as state_run,
    unwrap as unwrap,
    user_class as user_class,
    walk_modules as walk_modules,
    wrapped_key as wrapped_key,
    wrapper_chain as wrapper_chain,
)
