from .averages import (
    average as average,
    parse_weights as parse_weights,
)
