from .leases import (
    CLOCK as CLOCK,
    LEASE as LEASE,
    STALE_SECONDS as STALE_SECONDS,
    ExclusiveLease as ExclusiveLease,
    holder_of as holder_of,
    mark_holder as mark_holder,
    may_live as may_live,
    new_mark as new_mark,
    parse_mark as parse_mark,
    put_mark as put_mark,
    read_mark as read_mark,
    stale_seconds as stale_seconds,
    store_time as store_time,
)
from .marks import (
    PIN as PIN,
    SAVING as SAVING,
    SIGNED as SIGNED,
    TOMBSTONE as TOMBSTONE,
    is_mark as is_mark,
    list_after_removals as list_after_removals,
    living_marks as living_marks,
)
from .pins import (
    pin as pin,
    pin_reason as pin_reason,
    unpin as unpin,
)
from .reader_leases import (
    hold_lease as hold_lease,
    lease_reasons as lease_reasons,
)
from .save_mark import (
    SaveMark as SaveMark,
    clear_spent_mark as clear_spent_mark,
)
