from .conversion import (
    ConvertReport as ConvertReport,
    convert as convert,
    open_source as open_source,
    write_converted as write_converted,
)
from .copy_check import (
    SLICE_BYTES as SLICE_BYTES,
    spec_differences as spec_differences,
)
from .folder import (
    base_of_config as base_of_config,
)
from .request import (
    ConvertOptions as ConvertOptions,
    check_apart as check_apart,
    convert_options as convert_options,
)
from .views import (
    FLOAT_DTYPES as FLOAT_DTYPES,
    untie_file as untie_file,
)
