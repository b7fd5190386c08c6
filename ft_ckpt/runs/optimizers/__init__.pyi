from .descriptions import (
    differing_optimizer_settings as differing_optimizer_settings,
    merge_descriptions as merge_descriptions,
    settings_by_rank as settings_by_rank,
)
from .groups import (
    match_groups as match_groups,
    set_groups as set_groups,
    settings_of as settings_of,
)
from .kinds import (
    Description as Description,
    OptimizerKind as OptimizerKind,
    engine_counters as engine_counters,
    kind_of_optimizer as kind_of_optimizer,
    unwrap_optimizer as unwrap_optimizer,
)
from .parameters import (
    names_of_groups as names_of_groups,
    parameter_of as parameter_of,
    sources_by_parameter as sources_by_parameter,
    trained_identities as trained_identities,
)
from .torch_optimizers import (
    TorchOptimizers as TorchOptimizers,
    is_schedule_free_in_training as is_schedule_free_in_training,
    refuse_missing_state as refuse_missing_state,
)
from .values import (
    LEAVES as LEAVES,
    decode_setting as decode_setting,
    encode_if_plain as encode_if_plain,
    is_dense as is_dense,
    tensors_of_entry as tensors_of_entry,
)
