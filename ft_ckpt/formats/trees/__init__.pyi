from .naming import (
    LEAF_SPEC as LEAF_SPEC,
    describe_tree as describe_tree,
    leaf_names as leaf_names,
    leaf_number as leaf_number,
    safe_name as safe_name,
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
    decode_value as decode_value,
    dump_object as dump_object,
    encode_node as encode_node,
    encode_value as encode_value,
    load_object as load_object,
)
