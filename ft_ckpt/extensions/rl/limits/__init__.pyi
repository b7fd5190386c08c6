from .exporting import (
    export as export,
)
from .preflight import (
    check_for as check_for,
    compare_base as compare_base,
    compare_configs as compare_configs,
    findings as findings,
    needs_export as needs_export,
)
