from .file_index import (
    FOOTER_BYTES as FOOTER_BYTES,
    NO_DIGEST as NO_DIGEST,
    TREE as TREE,
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
