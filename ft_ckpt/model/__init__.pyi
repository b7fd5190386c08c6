from .attaching import (
    attach_adapters as attach_adapters,
)
from .base_changes import (
    refuse_merged as refuse_merged,
    start_keeps_base as start_keeps_base,
)
from .base_files import (
    base_folder as base_folder,
)
from .base_samples import (
    differences_of_base as differences_of_base,
    differing_elements as differing_elements,
    identifying_tensors as identifying_tensors,
    record_of_base as record_of_base,
)
from .base_watch import (
    BaseWatch as BaseWatch,
)
from .config_check import (
    check_config as check_config,
)
from .conversion import (
    load_conversion_table as load_conversion_table,
)
from .entries import (
    Entry as Entry,
    Group as Group,
    MergeChoice as MergeChoice,
    Merged as Merged,
    Part as Part,
    finite_numbers as finite_numbers,
    merge_choice as merge_choice,
    unchanged_entry as unchanged_entry,
)
from .folder import (
    FolderPart as FolderPart,
    WeightsFolder as WeightsFolder,
    differing_parts as differing_parts,
    open_folder as open_folder,
)
from .folder_files import (
    join_weight_files as join_weight_files,
    weight_files as weight_files,
)
from .libraries import (
    PREFIX as PREFIX,
    library_of as library_of,
)
from .load import (
    load_model as load_model,
)
from .load_report import (
    LoadReport as LoadReport,
)
from .mapped_model import (
    base_on_files as base_on_files,
)
from .model_files import (
    nested_configs as nested_configs,
)
from .part_files import (
    check_companions as check_companions,
    write_part_files as write_part_files,
)
from .parts import (
    Attribute as Attribute,
    check_model as check_model,
    is_adapter_run as is_adapter_run,
    is_of_adapters as is_of_adapters,
    model_inside as model_inside,
    parts_of as parts_of,
)
from .peft_paths import (
    has_adapters as has_adapters,
    is_peft_model as is_peft_model,
)
from .quantisation import (
    is_quantised as is_quantised,
)
from .selection import (
    is_pretrained as is_pretrained,
    model_part as model_part,
    without_own_layouts as without_own_layouts,
)
from .settings import (
    differences_between as differences_between,
    differences_of_live as differences_of_live,
    is_irreproducible as is_irreproducible,
)
from .settings_files import (
    EXTRA_FILE as EXTRA_FILE,
    SETTINGS_FILES as SETTINGS_FILES,
    adapter_settings as adapter_settings,
    quantisation_of as quantisation_of,
)
from .tokenizer import (
    notes_on_classes as notes_on_classes,
    write_tokenizer as write_tokenizer,
)
from .view import (
    View as View,
    module_at as module_at,
)
