from .engine_parts import (
    EngineParts as EngineParts,
)
from .groups import (
    global_rank as global_rank,
    is_subset_of_ranks as is_subset_of_ranks,
    ranks_in_order as ranks_in_order,
)
from .sharding import (
    Box as Box,
    FlatSharding as FlatSharding,
    Mesh as Mesh,
    MeshSharding as MeshSharding,
    OpaqueSharding as OpaqueSharding,
    OwnedSharding as OwnedSharding,
    ReplicatedSharding as ReplicatedSharding,
    Sharding as Sharding,
    is_known_to_all as is_known_to_all,
    part_count as part_count,
    unravel_index as unravel_index,
)
from .source import (
    Source as Source,
    box_memories as box_memories,
    held_source as held_source,
)
from .tensor_kind import (
    PlainTensors as PlainTensors,
    StandInTensors as StandInTensors,
    TensorKind as TensorKind,
    TensorLayout as TensorLayout,
    give_memory as give_memory,
    layout_like as layout_like,
    shaped_as_box as shaped_as_box,
    stand_in_parameter as stand_in_parameter,
)
