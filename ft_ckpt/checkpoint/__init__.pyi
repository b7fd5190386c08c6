from .cards import (
    CARD_NAME as CARD_NAME,
    with_current_cards as with_current_cards,
)
from .catalog import (
    CheckpointInfo as CheckpointInfo,
    Listing as Listing,
    discover as discover,
    in_run_order as in_run_order,
    list_checkpoints as list_checkpoints,
    list_readable as list_readable,
    run_checkpoints as run_checkpoints,
)
from .commit import (
    check_target as check_target,
    place_files as place_files,
)
from .contents import (
    ACCELERATE_MARKER as ACCELERATE_MARKER,
    CHECKPOINT as CHECKPOINT,
    RUN as RUN,
    RUNS as RUNS,
    UNREADABLE as UNREADABLE,
    Contents as Contents,
    class_in as class_in,
    describe_contents as describe_contents,
    document_in as document_in,
    why_no_checkpoint as why_no_checkpoint,
)
from .delete import (
    STATE as STATE,
    Removal as Removal,
    delete_checkpoint as delete_checkpoint,
    manifest_files as manifest_files,
    set_aside as set_aside,
    without_state as without_state,
)
from .earlier import (
    EarlierCheckpoint as EarlierCheckpoint,
    earlier_checkpoints as earlier_checkpoints,
)
from .foreign_files import (
    listing_manifest as listing_manifest,
    verify_foreign as verify_foreign,
    verify_listed as verify_listed,
)
from .hub_names import (
    is_hub_name as is_hub_name,
)
from .leases import (
    ExclusiveLease as ExclusiveLease,
    holder_of as holder_of,
    mark_holder as mark_holder,
    may_live as may_live,
    parse_mark as parse_mark,
    read_mark as read_mark,
    stale_seconds as stale_seconds,
    store_time as store_time,
)
from .manifest import (
    DIFFUSERS_LORA_FILE as DIFFUSERS_LORA_FILE,
    DIFFUSERS_MODEL_FILE as DIFFUSERS_MODEL_FILE,
    MANIFEST_LIMIT_BYTES as MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME as MANIFEST_NAME,
    BaseRecord as BaseRecord,
    Manifest as Manifest,
    PartRecord as PartRecord,
    age_of as age_of,
    content_identity as content_identity,
    manifest_from_json as manifest_from_json,
    manifest_to_json as manifest_to_json,
    parse_time as parse_time,
)
from .marks import (
    SIGNED as SIGNED,
    TOMBSTONE as TOMBSTONE,
    is_mark as is_mark,
)
from .metrics import (
    check_metric as check_metric,
)
from .misleading import (
    is_misleading as is_misleading,
)
from .opening import (
    OpenCheckpoint as OpenCheckpoint,
    checkpoint_around as checkpoint_around,
    files_in as files_in,
    hold_open as hold_open,
    open_checkpoint as open_checkpoint,
    text_identity as text_identity,
)
from .pins import (
    pin as pin,
    pin_reason as pin_reason,
    unpin as unpin,
)
from .problems import (
    are_transient as are_transient,
    checkpoint_problems as checkpoint_problems,
    file_key as file_key,
    large_files as large_files,
    retry_transient as retry_transient,
    stored_bytes as stored_bytes,
)
from .recovery import (
    uncommit as uncommit,
)
from .run_folder import (
    RunFolder as RunFolder,
    open_run_folder as open_run_folder,
)
from .selection import (
    best as best,
    find_best as find_best,
    find_latest as find_latest,
    latest as latest,
)
from .signature import (
    SIGNATURE_NAME as SIGNATURE_NAME,
    SignedBy as SignedBy,
    make_signature as make_signature,
    signature_problems as signature_problems,
    unlisted_files as unlisted_files,
)
from .staging import (
    LocalStaging as LocalStaging,
    Staging as Staging,
    open_staging as open_staging,
    open_staging_at as open_staging_at,
    settle_staging_at as settle_staging_at,
    stage_store as stage_store,
)
from .stored_manifest import (
    is_delta as is_delta,
    load_manifest as load_manifest,
    manifest_text as manifest_text,
    parse_manifest as parse_manifest,
    read_manifest as read_manifest,
)
from .verification import (
    VerifyReport as VerifyReport,
    damage_of as damage_of,
    verify as verify,
)
