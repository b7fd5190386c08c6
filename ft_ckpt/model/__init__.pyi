from .adapters import (
    active_adapters as active_adapters,
    base_path as base_path,
    base_sources as base_sources,
    base_view as base_view,
    has_adapters as has_adapters,
    is_peft_model as is_peft_model,
    stored_base_names as stored_base_names,
)
from .attaching import (
    attach_adapters as attach_adapters,
)
from .base_class import (
    find_base_class as find_base_class,
)
from .base_files import (
    base_folder as base_folder,
)
from .base_model import (
    BaseWatch as BaseWatch,
    differences_of_base as differences_of_base,
    differing_elements as differing_elements,
    identifying_tensors as identifying_tensors,
    record_of_base as record_of_base,
    refuse_merged as refuse_merged,
    start_keeps_base as start_keeps_base,
)
from .companions import (
    is_quantised as is_quantised,
    nested_configs as nested_configs,
)
from .config_check import (
    check_config as check_config,
)
from .conversion import (
    load_conversion_table as load_conversion_table,
)
from .diffusers import (
    is_diffusers as is_diffusers,
    model_on_file as model_on_file,
    write_config as write_config,
)
from .entries import (
    Entry as Entry,
    Group as Group,
    MergeChoice as MergeChoice,
    Merged as Merged,
    Part as Part,
    finite_numbers as finite_numbers,
    lossy_casts as lossy_casts,
    main_dtype as main_dtype,
    merge_choice as merge_choice,
    shared_between as shared_between,
    unchanged_entry as unchanged_entry,
)
from .folder import (
    FolderPart as FolderPart,
    WeightsFolder as WeightsFolder,
    differing_class as differing_class,
    join_weight_files as join_weight_files,
    open_folder as open_folder,
    weight_files as weight_files,
)
from .libraries import (
    ADAPTER_FILE as ADAPTER_FILE,
    PREFIX as PREFIX,
    is_config_of_diffusers as is_config_of_diffusers,
    library_of as library_of,
)
from .load import (
    load_model as load_model,
)
from .load_report import (
    LoadReport as LoadReport,
)
from .mapped_model import (
    FileModel as FileModel,
    is_quantised_folder as is_quantised_folder,
    model_on_files as model_on_files,
)
from .parts import (
    Attribute as Attribute,
    check_model as check_model,
    is_adapter_run as is_adapter_run,
    is_of_adapters as is_of_adapters,
    kind_of as kind_of,
    model_inside as model_inside,
    parts_of as parts_of,
)
from .selection import (
    View as View,
    is_pretrained as is_pretrained,
    model_part as model_part,
    module_at as module_at,
    without_own_layouts as without_own_layouts,
)
from .settings import (
    EXTRA_FILE as EXTRA_FILE,
    SETTINGS_FILES as SETTINGS_FILES,
    adapter_settings as adapter_settings,
    differences_between as differences_between,
    differences_of_live as differences_of_live,
    differing_settings as differing_settings,
    is_irreproducible as is_irreproducible,
    quantisation_of as quantisation_of,
)
