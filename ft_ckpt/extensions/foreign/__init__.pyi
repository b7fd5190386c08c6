from .accelerate_folder import (
    find_accelerate_folder as find_accelerate_folder,
    read_accelerate_folder as read_accelerate_folder,
)
from .torch_file import (
    load_torch_values as load_torch_values,
)
from .torch_sums import (
    compare_sums as compare_sums,
)
