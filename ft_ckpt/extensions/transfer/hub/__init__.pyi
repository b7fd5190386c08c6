from .place import (
    HubPlace as HubPlace,
    parse_place as parse_place,
)
