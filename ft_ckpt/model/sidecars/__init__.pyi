from .config_check import (
    check_config as check_config,
)
from .model_files import (
    nested_configs as nested_configs,
)
from .part_files import (
    check_sidecars as check_sidecars,
    write_part_files as write_part_files,
)
from .quantisation import (
    is_quantised as is_quantised,
)
from .tokenizer import (
    notes_on_classes as notes_on_classes,
    write_tokenizer as write_tokenizer,
)
