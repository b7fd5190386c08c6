from .object_store import (
    ObjectStore as ObjectStore,
)
