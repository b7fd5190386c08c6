from .adapters import (
    adapter_parts as adapter_parts,
    why_redrawn as why_redrawn,
)
from .save_parts import (
    Attribute as Attribute,
    check_model as check_model,
    is_adapter_run as is_adapter_run,
    model_inside as model_inside,
    parts_of as parts_of,
    saves_adapters_only as saves_adapters_only,
)
