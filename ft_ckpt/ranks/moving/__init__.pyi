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
    stream_chunks as stream_chunks,
    wire_device as wire_device,
)
from .replicas import (
    WEIGHTS as WEIGHTS,
    box_key as box_key,
    digests_of as digests_of,
    elements_at as elements_at,
    has_readable_elements as has_readable_elements,
    sample_elements as sample_elements,
)
