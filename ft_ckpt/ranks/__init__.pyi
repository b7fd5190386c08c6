from .agreement import (
    Values as Values,
    rank_numbers as rank_numbers,
    runs_of as runs_of,
    values_of_runs as values_of_runs,
)
from .broadcast import (
    Filler as Filler,
    choose_filler as choose_filler,
    each_reads as each_reads,
)
from .fill import (
    WantedTensor as WantedTensor,
    check_all as check_all,
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
from .groups import (
    global_rank as global_rank,
    is_subset_of_ranks as is_subset_of_ranks,
    ranks_in_order as ranks_in_order,
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
from .tensor_kind import (
    TensorKind as TensorKind,
    TensorLayout as TensorLayout,
    give_memory as give_memory,
    layout_like as layout_like,
    stand_in_parameter as stand_in_parameter,
)
from .tensor_kinds import (
    is_distributed as is_distributed,
    layout_of as layout_of,
    layouts_of as layouts_of,
    local_part as local_part,
    optimizer_parameter as optimizer_parameter,
    shows_runs as shows_runs,
    state_run as state_run,
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
    Wrapper as Wrapper,
)
from .wrappers import (
    drop_kept_gradients as drop_kept_gradients,
    hides_tensors as hides_tensors,
    hiding_gradients as hiding_gradients,
    is_engine_attribute as is_engine_attribute,
    keeps_weights as keeps_weights,
    kept_gradients as kept_gradients,
    shallow_copy as shallow_copy,
    unwrap as unwrap,
    user_class as user_class,
    walk_modules as walk_modules,
    wrapped_key as wrapped_key,
    wrapper_chain as wrapper_chain,
)
