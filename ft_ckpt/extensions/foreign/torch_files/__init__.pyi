from .layout import (
    lay_out_torch as lay_out_torch,
)
from .saving import (
    check_torch_object as check_torch_object,
    save_torch_object as save_torch_object,
)
from .stand_ins import (
    identity_of as identity_of,
    is_stand_in as is_stand_in,
    kind_of_leaf as kind_of_leaf,
    named_leaves as named_leaves,
    split_tensors as split_tensors,
)
from .sums import (
    check_sums as check_sums,
    compare_sums as compare_sums,
)
from .tensors import (
    TorchFile as TorchFile,
    local_copy as local_copy,
    open_torch_file as open_torch_file,
)
from .values import (
    is_harmless as is_harmless,
    is_torch_file as is_torch_file,
    load_torch_object as load_torch_object,
    load_torch_part as load_torch_part,
    load_torch_value as load_torch_value,
    load_torch_values as load_torch_values,
)
