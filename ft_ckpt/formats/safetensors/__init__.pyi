from .header import (
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
