from .live_merge import (
    merged_part as merged_part,
)
from .logits import (
    live_logits as live_logits,
)
from .merge_files import (
    merge as merge,
)
