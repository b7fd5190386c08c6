from .zero import (
    DeepSpeedWrapper as DeepSpeedWrapper,
)
from .zero_optimizer import (
    EngineCounters as EngineCounters,
    is_zero as is_zero,
)
