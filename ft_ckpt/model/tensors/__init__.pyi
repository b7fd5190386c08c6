from .base_changes import (
    irreproducible as irreproducible,
    keeps_base as keeps_base,
    refuse_merged as refuse_merged,
    start_keeps_base as start_keeps_base,
)
from .conversion import (
    cast_entries as cast_entries,
    converted_entries as converted_entries,
    load_conversion_table as load_conversion_table,
    stored_as_in_memory as stored_as_in_memory,
    with_whole_parameters as with_whole_parameters,
)
from .entries import (
    Entry as Entry,
    Group as Group,
    Part as Part,
    unchanged_entry as unchanged_entry,
)
from .libraries import (
    ADAPTER_FILE as ADAPTER_FILE,
    DIFFUSERS as DIFFUSERS,
    PREFIX as PREFIX,
    is_config_of_diffusers as is_config_of_diffusers,
    library_of as library_of,
)
from .merges import (
    MergeChoice as MergeChoice,
    Merged as Merged,
    finite_numbers as finite_numbers,
    merge_choice as merge_choice,
)
from .peft_paths import (
    TO_BASE as TO_BASE,
    base_name as base_name,
    entries_of_base as entries_of_base,
    has_adapters as has_adapters,
    is_peft_model as is_peft_model,
    layers_with_base as layers_with_base,
    model_below as model_below,
    peft_name as peft_name,
    root_steps as root_steps,
    stored_base_names as stored_base_names,
)
from .selection import (
    is_pretrained as is_pretrained,
    made_by_class as made_by_class,
    model_part as model_part,
    put_at as put_at,
    tensor_at as tensor_at,
    without_own_layouts as without_own_layouts,
)
from .view import (
    View as View,
    module_at as module_at,
    view_of as view_of,
)
