from .identity import (
    Relation as Relation,
    content_key as content_key,
    is_same_copy as is_same_copy,
    is_there as is_there,
    manifest_at as manifest_at,
    refuse_occupied as refuse_occupied,
    relation_of as relation_of,
)
from .pull_cache import (
    pull_cached as pull_cached,
)
from .reports import (
    CopyReport as CopyReport,
    PullReport as PullReport,
    PushReport as PushReport,
    SyncReport as SyncReport,
    new_copy_report as new_copy_report,
)
from .signatures import (
    Signed as Signed,
    put_signature as put_signature,
    read_signature as read_signature,
    signature_of_copy as signature_of_copy,
)
from .signing import (
    sign as sign,
)
from .store_copies import (
    copy_open as copy_open,
)
