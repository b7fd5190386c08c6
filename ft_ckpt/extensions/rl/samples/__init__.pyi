from .frontier import (
    Frontier as Frontier,
    Ticket as Ticket,
)
