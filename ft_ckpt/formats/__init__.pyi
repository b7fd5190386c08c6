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
from .file_index import (
    FOOTER_BYTES as FOOTER_BYTES,
    NO_DIGEST as NO_DIGEST,
    Row as Row,
    TensorIndex as TensorIndex,
    check_index as check_index,
    flat_tree as flat_tree,
    index_footer as index_footer,
    index_text as index_text,
    is_flat as is_flat,
    moved_index as moved_index,
    read_index as read_index,
    with_digests as with_digests,
)
from .indexed_file import (
    IndexedFile as IndexedFile,
    as_tensor as as_tensor,
    named_tensors as named_tensors,
)
from .layout import (
    ITEM_BYTES as ITEM_BYTES,
    Layout as Layout,
    Spec as Spec,
    TensorRecord as TensorRecord,
    checked_sizes as checked_sizes,
)
from .leaf_names import (
    LEAF_SPEC as LEAF_SPEC,
    describe_tree as describe_tree,
    leaf_number as leaf_number,
    safe_name as safe_name,
)
from .pickles import (
    PLAIN_VALUES as PLAIN_VALUES,
    OpaqueObject as OpaqueObject,
    Sealed as Sealed,
    StandIn as StandIn,
    stand_in as stand_in,
    unpickle as unpickle,
)
from .pytree import (
    MAX_LEVELS as MAX_LEVELS,
    PLAIN as PLAIN,
    SCALARS as SCALARS,
    Leaf as Leaf,
    Node as Node,
    flatten as flatten,
    leaf_numbers as leaf_numbers,
    quoted_key as quoted_key,
    try_flatten as try_flatten,
    unflatten as unflatten,
    vars_of as vars_of,
)
from .pytree_json import (
    decode_node as decode_node,
    dump_object as dump_object,
    encode_node as encode_node,
    load_object as load_object,
)
from .raw_file import (
    FREE_BYTES as FREE_BYTES,
    MAP_BYTES as MAP_BYTES,
    FileStream as FileStream,
    RawFile as RawFile,
)
from .reading import (
    THREADS as THREADS,
    DeviceTensors as DeviceTensors,
    Landing as Landing,
    StraightLanding as StraightLanding,
    bytes_at as bytes_at,
    copy_bytes as copy_bytes,
    read_onto as read_onto,
    read_runs as read_runs,
    whole_run as whole_run,
)
from .registry import (
    DEFAULT_FORMAT as DEFAULT_FORMAT,
    checkpoint_format_of as checkpoint_format_of,
    format_named as format_named,
    register_format as register_format,
    tensor_formats as tensor_formats,
    written_formats as written_formats,
)
from .safetensors import (
    HELPER as HELPER,
    NAMES as NAMES,
    HeaderEntry as HeaderEntry,
    SafetensorsHeader as SafetensorsHeader,
    begins_with_header as begins_with_header,
    lay_out_safetensors as lay_out_safetensors,
    parse_header as parse_header,
    read_header as read_header,
)
from .safetensors_file import (
    is_safetensors as is_safetensors,
    link_second_names as link_second_names,
    open_safetensors as open_safetensors,
    tree_metadata as tree_metadata,
)
from .shards import (
    shard_index as shard_index,
    split_into_files as split_into_files,
)
from .simple_values import (
    decode_value as decode_value,
    encode_value as encode_value,
)
from .tensor_file import (
    JoinedFile as JoinedFile,
    ListedFile as ListedFile,
    MemoryFile as MemoryFile,
    StoredTensor as StoredTensor,
    TensorFile as TensorFile,
    TensorView as TensorView,
)
from .tensor_format import (
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
from .zip_records import (
    ZIP_MAGIC as ZIP_MAGIC,
    record_span as record_span,
)
