from .arguments import (
    check_accelerator as check_accelerator,
    check_loop as check_loop,
    check_mappings as check_mappings,
    check_schedule as check_schedule,
    check_tokenizer as check_tokenizer,
    in_words as in_words,
)
from .data_position import (
    DataPosition as DataPosition,
)
from .data_positions import (
    DataPositions as DataPositions,
    position_in_state as position_in_state,
)
from .extension_parts import (
    UploadTerms as UploadTerms,
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
from .gradients import (
    restore_gradients as restore_gradients,
)
from .items import (
    bare_identity as bare_identity,
    run_items as run_items,
)
from .optimizer_groups import (
    match_groups as match_groups,
    set_groups as set_groups,
    settings_of as settings_of,
)
from .optimizer_kinds import (
    Description as Description,
    unwrap_optimizer as unwrap_optimizer,
)
from .optimizer_parameters import (
    names_of_groups as names_of_groups,
    parameter_of as parameter_of,
    sources_by_parameter as sources_by_parameter,
)
from .optimizer_values import (
    encode_if_plain as encode_if_plain,
)
from .progress import (
    Progress as Progress,
)
from .prune import (
    PruneReport as PruneReport,
    prune_after_save as prune_after_save,
    prune_run as prune_run,
    recover_all as recover_all,
    remove_checkpoints as remove_checkpoints,
    room_maker as room_maker,
)
from .replacing import (
    has_training_state as has_training_state,
)
from .restore import (
    restore_weights as restore_weights,
)
from .restore_report import (
    Restored as Restored,
    RestoreReport as RestoreReport,
    agree_on_outcomes as agree_on_outcomes,
)
from .resume import (
    resume_run as resume_run,
)
from .resume_point import (
    ResumePoint as ResumePoint,
    open_resume_point as open_resume_point,
)
from .resume_request import (
    ResumeRequest as ResumeRequest,
    parse_mode as parse_mode,
)
from .rng import (
    GeneratorStates as GeneratorStates,
    capture_generators as capture_generators,
    generator_problems as generator_problems,
    plain_states as plain_states,
    restore_generators as restore_generators,
)
from .run import (
    TrainingRun as TrainingRun,
)
from .run_places import (
    open_run_places as open_run_places,
)
from .run_saves import (
    RunSaves as RunSaves,
)
from .run_tensors import (
    run_sources as run_sources,
    walk_models as walk_models,
)
from .shared_opening import (
    open_for_all as open_for_all,
)
from .state_document import (
    read_document as read_document,
)
from .survey import (
    survey_run as survey_run,
)
from .torch_optimizers import (
    TorchOptimizers as TorchOptimizers,
    refuse_missing_state as refuse_missing_state,
)
from .triggers import (
    END as END,
    VARIABLE as VARIABLE,
    ClockPoll as ClockPoll,
    Rehearsal as Rehearsal,
    Step as Step,
    read_steps as read_steps,
    start_recorder as start_recorder,
)
