from .zero import (
    DeepSpeedWrapper as DeepSpeedWrapper,
)
