from .place import (
    HubPlace as HubPlace,
)
