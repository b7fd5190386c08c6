from .following import (
    FOLLOW_SECONDS as FOLLOW_SECONDS,
    CheckpointKey as CheckpointKey,
    follow as follow,
    key_of as key_of,
    poll_checkpoints as poll_checkpoints,
    stop_on_signal as stop_on_signal,
)
from .lease import (
    RunLease as RunLease,
    lease_run as lease_run,
)
from .places import (
    RunPlaces as RunPlaces,
    has_training_state as has_training_state,
    open_run_places as open_run_places,
    refuse_replacing as refuse_replacing,
)
from .prune import (
    PruneReport as PruneReport,
    make_room as make_room,
    prune_after_save as prune_after_save,
    prune_run as prune_run,
    recover_all as recover_all,
    remove_checkpoints as remove_checkpoints,
    room_maker as room_maker,
)
from .survey import (
    survey_run as survey_run,
)
