from .attaching import (
    attach_adapters as attach_adapters,
)
from .loading import (
    load_model as load_model,
)
from .report import (
    LoadReport as LoadReport,
)
