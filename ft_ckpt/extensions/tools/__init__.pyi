from .diff import (
    Difference as Difference,
    by_layer as by_layer,
    compare_files as compare_files,
    compare_settings as compare_settings,
)
from .lazy_tensor import (
    LazyTensor as LazyTensor,
)
from .objects import (
    compress_file as compress_file,
    load as load,
    save as save,
)
