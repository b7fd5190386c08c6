from .exporting import (
    export as export,
)
from .full_weights import (
    compare_configs as compare_configs,
)
from .preflight import (
    check_for as check_for,
    compare_base as compare_base,
    findings as findings,
    needs_export as needs_export,
)
