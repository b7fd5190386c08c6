from .chains import (
    append_checkpoint as append_checkpoint,
)
from .rebuilding import (
    drop_rebuilt as drop_rebuilt,
    is_staged as is_staged,
    mark_staged as mark_staged,
)
