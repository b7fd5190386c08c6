from .cerebras import (
    leaf_names as leaf_names,
)
from .hdf5 import (
    open_foreign as open_foreign,
    open_hdf5 as open_hdf5,
)
