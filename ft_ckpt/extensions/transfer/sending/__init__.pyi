from .pushing import (
    PendingPush as PendingPush,
    begin_push as begin_push,
    pull as pull,
    push as push,
    push_goal as push_goal,
    push_now as push_now,
)
from .syncing import (
    copy as copy,
    sync as sync,
)
