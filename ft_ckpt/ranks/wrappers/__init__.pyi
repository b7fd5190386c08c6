from .module_state import (
    refuse_one_way_state as refuse_one_way_state,
    wrapper_steps as wrapper_steps,
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
