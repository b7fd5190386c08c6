from .averaging import (
    average as average,
    parse_weights as parse_weights,
)
from .convert_request import (
    check_apart as check_apart,
    convert_options as convert_options,
)
from .converting import (
    ConvertReport as ConvertReport,
    convert as convert,
    open_source as open_source,
    write_converted as write_converted,
)
from .diff import (
    Difference as Difference,
    by_layer as by_layer,
    compare_files as compare_files,
    compare_settings as compare_settings,
)
from .logits import (
    live_logits as live_logits,
)
from .merge_files import (
    merge as merge,
)
from .merging import (
    merged_part as merged_part,
)
from .objects import (
    compress_file as compress_file,
    load as load,
    save as save,
)
