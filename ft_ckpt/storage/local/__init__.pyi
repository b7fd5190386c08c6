from .inside import (
    check_files_inside as check_files_inside,
    check_prefix_inside as check_prefix_inside,
    leads_out as leads_out,
)
from .local_store import (
    LocalStore as LocalStore,
    clear_old_drafts as clear_old_drafts,
    folder_of as folder_of,
    linked_path as linked_path,
    make_like as make_like,
    readable_mode as readable_mode,
    temporary_store as temporary_store,
)
from .locks import (
    DRAFTS as DRAFTS,
    claim_leftover as claim_leftover,
    clear_drafts as clear_drafts,
    has_ended as has_ended,
    holding_lock as holding_lock,
    lock_descriptor as lock_descriptor,
    locked_folder as locked_folder,
    make_locked_folder as make_locked_folder,
    release_lock as release_lock,
)
from .trials import (
    BUCKET_NEEDS as BUCKET_NEEDS,
    FOLDER_NEEDS as FOLDER_NEEDS,
    IF_NEW as IF_NEW,
    TRIAL as TRIAL,
    Ability as Ability,
    is_on_bucket as is_on_bucket,
    refuse_unfit as refuse_unfit,
    try_place as try_place,
)
