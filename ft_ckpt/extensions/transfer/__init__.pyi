from .copies import (
    copy_open as copy_open,
)
from .copying import (
    copy as copy,
)
from .endpoints import (
    PushOptions as PushOptions,
)
from .hub_place import (
    HubPlace as HubPlace,
)
from .identity import (
    content_key as content_key,
)
from .outgoing import (
    weights_manifest as weights_manifest,
)
from .pushing import (
    PendingPush as PendingPush,
    begin_push as begin_push,
    pull as pull,
    push as push,
    push_goal as push_goal,
    push_now as push_now,
)
from .reports import (
    CopyReport as CopyReport,
    PullReport as PullReport,
    PushReport as PushReport,
    SyncReport as SyncReport,
)
from .signing import (
    sign as sign,
)
from .syncing import (
    sync as sync,
)
