from .frontier import (
    Frontier as Frontier,
)
