from .commit import (
    check_target as check_target,
    place_files as place_files,
)
from .delete import (
    STATE as STATE,
    Removal as Removal,
    delete_checkpoint as delete_checkpoint,
    delete_state as delete_state,
    manifest_files as manifest_files,
    set_aside as set_aside,
    without_state as without_state,
)
from .object_staging import (
    open_object_staging as open_object_staging,
    put_manifest as put_manifest,
)
from .recovery import (
    recover_target as recover_target,
    uncommit as uncommit,
)
from .run_folder import (
    RunFolder as RunFolder,
    open_run_folder as open_run_folder,
)
from .staging import (
    LocalStaging as LocalStaging,
    Staging as Staging,
    open_staging as open_staging,
    open_staging_at as open_staging_at,
    recover_staging_at as recover_staging_at,
    stage_store as stage_store,
)
