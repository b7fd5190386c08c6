from .folder import (
    FolderPart as FolderPart,
    WeightsFolder as WeightsFolder,
    differing_parts as differing_parts,
    open_folder as open_folder,
    refuse_delta as refuse_delta,
)
from .folder_files import (
    join_weight_files as join_weight_files,
    weight_files as weight_files,
)
from .settings import (
    PATTERNS as PATTERNS,
    differences_between as differences_between,
    differences_of_live as differences_of_live,
    is_irreproducible as is_irreproducible,
    order_counts as order_counts,
)
from .settings_files import (
    EXTRA_FILE as EXTRA_FILE,
    SETTINGS_FILES as SETTINGS_FILES,
    absurd_counts as absurd_counts,
    adapter_settings as adapter_settings,
    quantisation_of as quantisation_of,
)
from .weights import (
    compare_torch_sums as compare_torch_sums,
    fetching_weights as fetching_weights,
    open_weights as open_weights,
    path_in_part as path_in_part,
    read_extra_values as read_extra_values,
    read_weights as read_weights,
    weight_names as weight_names,
)
