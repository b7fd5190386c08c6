from .arguments import (
    check_accelerator as check_accelerator,
    check_loop as check_loop,
    check_mappings as check_mappings,
    check_schedule as check_schedule,
    check_tokenizer as check_tokenizer,
    in_words as in_words,
)
from .choose import (
    Wanted as Wanted,
    checkpoint_facts as checkpoint_facts,
    has_training_state as has_training_state,
    open_to_all as open_to_all,
    parse_mode as parse_mode,
)
from .data_position import (
    DataPosition as DataPosition,
    DataPositions as DataPositions,
    position_in_state as position_in_state,
)
from .follow_up import (
    SaveHook as SaveHook,
    hooks_of as hooks_of,
    make_follow_up as make_follow_up,
)
from .following import (
    FOLLOW_SECONDS as FOLLOW_SECONDS,
    CheckpointKey as CheckpointKey,
    follow as follow,
    key_of as key_of,
    looks as looks,
    stop_on_signal as stop_on_signal,
)
from .items import (
    bare_identity as bare_identity,
    known_sources as known_sources,
    run_items as run_items,
    walk_models as walk_models,
)
from .optimizer_values import (
    encode_if_plain as encode_if_plain,
)
from .optimizers import (
    Description as Description,
    match_groups as match_groups,
    set_groups as set_groups,
    settings_of as settings_of,
    unwrap_optimizer as unwrap_optimizer,
)
from .prune import (
    PruneReport as PruneReport,
    prune_after_save as prune_after_save,
    prune_run as prune_run,
    recover_all as recover_all,
    remove_checkpoints as remove_checkpoints,
    room_maker as room_maker,
    survey_run as survey_run,
)
from .restore import (
    Restored as Restored,
    RestoreReport as RestoreReport,
    agree_on_outcomes as agree_on_outcomes,
    restore_weights as restore_weights,
)
from .resume import (
    resume_run as resume_run,
)
from .run import (
    Progress as Progress,
    TrainingRun as TrainingRun,
)
from .run_places import (
    open_run_places as open_run_places,
)
from .run_saves import (
    RunSaves as RunSaves,
)
from .state import (
    ResumePoint as ResumePoint,
    open_resume_point as open_resume_point,
    read_document as read_document,
)
from .triggers import (
    END as END,
    VARIABLE as VARIABLE,
    ClockPoll as ClockPoll,
    Rehearsal as Rehearsal,
    Step as Step,
    read_steps as read_steps,
)
