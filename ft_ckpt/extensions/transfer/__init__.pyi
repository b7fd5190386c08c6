from .copies import (
    CopyReport as CopyReport,
    content_identity as content_identity,
    content_key as content_key,
    copy as copy,
    copy_open as copy_open,
)
from .hub import (
    HubPlace as HubPlace,
)
from .outgoing import (
    PullReport as PullReport,
    PushOptions as PushOptions,
    PushReport as PushReport,
    weights_manifest as weights_manifest,
)
from .pushing import (
    PendingPush as PendingPush,
    begin_push as begin_push,
    pull as pull,
    push as push,
    push_goal as push_goal,
    push_now as push_now,
    wait_for_pushes as wait_for_pushes,
    warn_of_unpushed as warn_of_unpushed,
)
from .signing import (
    sign as sign,
)
from .syncing import (
    LONGEST_EXIT_SECONDS as LONGEST_EXIT_SECONDS,
    RunUploads as RunUploads,
    SyncReport as SyncReport,
    UploadTerms as UploadTerms,
    sync as sync,
)
