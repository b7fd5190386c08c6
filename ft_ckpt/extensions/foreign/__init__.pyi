from .torch_file import (
    load_torch_values as load_torch_values,
)
from .torch_sums import (
    compare_sums as compare_sums,
)
