from .detect import (
    detect_format as detect_format,
    format_by_suffix as format_by_suffix,
    open_tensor_file as open_tensor_file,
)
from .dtypes import (
    all_finite as all_finite,
    dtype_name as dtype_name,
    dtype_of as dtype_of,
    is_within as is_within,
)
from .layout import (
    ITEM_BYTES as ITEM_BYTES,
    Layout as Layout,
    Spec as Spec,
    TensorRecord as TensorRecord,
    ceil_div as ceil_div,
    checked_sizes as checked_sizes,
)
from .registry import (
    DEFAULT_FORMAT as DEFAULT_FORMAT,
    checkpoint_format_of as checkpoint_format_of,
    format_named as format_named,
    register_format as register_format,
    tensor_formats as tensor_formats,
    written_formats as written_formats,
)
from .shards import (
    shard_index as shard_index,
    split_into_files as split_into_files,
)
from .tensor_format import (
    CheckpointFormat as CheckpointFormat,
    FolderFormat as FolderFormat,
    FolderWriter as FolderWriter,
    LaidOutObjects as LaidOutObjects,
    LibraryObjects as LibraryObjects,
    ReadRange as ReadRange,
    TensorFormat as TensorFormat,
)
from .writing import (
    FilePlan as FilePlan,
    write_file as write_file,
)
