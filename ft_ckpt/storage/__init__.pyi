from .blocks import (
    ALIGNMENT as ALIGNMENT,
    BLOCK_BYTES as BLOCK_BYTES,
    Block as Block,
    BlockKeeper as BlockKeeper,
    Memory as Memory,
    address_of as address_of,
    new_block as new_block,
    new_block_of as new_block_of,
)
from .cached_object import (
    CachedObject as CachedObject,
)
from .copying import (
    SMALL_COPY_BYTES as SMALL_COPY_BYTES,
    copy_object as copy_object,
    local_folder as local_folder,
    local_version as local_version,
)
from .digests import (
    SMALL_BYTES as SMALL_BYTES,
    Cut as Cut,
    FileRecord as FileRecord,
    RunningDigest as RunningDigest,
    chunk_of_rank as chunk_of_rank,
    digest_of_bytes as digest_of_bytes,
    digest_of_open as digest_of_open,
    joined_digest as joined_digest,
    read_record as read_record,
    record_of as record_of,
    size_problem as size_problem,
    unread_problem as unread_problem,
    whole_digest as whole_digest,
)
from .direct_io import (
    LocalWriting as LocalWriting,
)
from .inside import (
    check_files_inside as check_files_inside,
    check_prefix_inside as check_prefix_inside,
    leads_out as leads_out,
)
from .listed_store import (
    ListedStore as ListedStore,
    hold_listed as hold_listed,
)
from .local_disk import (
    ABANDONED_SECONDS as ABANDONED_SECONDS,
    PREFIX as PREFIX,
    list_names as list_names,
    make_folder as make_folder,
    permission_bits as permission_bits,
    regular_descriptor as regular_descriptor,
    walk_tree as walk_tree,
)
from .local_file import (
    LocalFile as LocalFile,
    MappedBytes as MappedBytes,
    open_local_file as open_local_file,
)
from .local_store import (
    LocalStore as LocalStore,
    clear_old_drafts as clear_old_drafts,
    folder_of as folder_of,
    make_like as make_like,
    temporary_store as temporary_store,
)
from .locations import (
    HUB_BUCKETS as HUB_BUCKETS,
    local_path as local_path,
    location_name as location_name,
    refuse_secrets as refuse_secrets,
    shown_location as shown_location,
)
from .locks import (
    OWNER as OWNER,
    claim_leftover as claim_leftover,
    clear_drafts as clear_drafts,
    has_ended as has_ended,
    holding_lock as holding_lock,
    is_gone as is_gone,
    is_of_this_machine as is_of_this_machine,
    lock_descriptor as lock_descriptor,
    locked_folder as locked_folder,
    machine_id as machine_id,
    make_locked_folder as make_locked_folder,
    new_owner as new_owner,
    process_facts as process_facts,
    release_lock as release_lock,
    steady_seconds as steady_seconds,
)
from .mounts import (
    MountedFrom as MountedFrom,
    mount_of as mount_of,
)
from .place import (
    Place as Place,
    absolute_location as absolute_location,
    is_hub_bucket as is_hub_bucket,
    open_place as open_place,
)
from .prefetch import (
    ByteRun as ByteRun,
    is_in_page_cache as is_in_page_cache,
    read_ahead as read_ahead,
    read_in_place as read_in_place,
)
from .progress import (
    is_worth_showing as is_worth_showing,
    track_bytes as track_bytes,
    track_reads as track_reads,
)
from .scratch import (
    LibraryFile as LibraryFile,
    files_below as files_below,
    files_made_by as files_made_by,
    replaced_object as replaced_object,
    scratch_file as scratch_file,
    scratch_folder as scratch_folder,
    spool_file as spool_file,
)
from .store import (
    Folder as Folder,
    FolderListing as FolderListing,
    Readable as Readable,
    RemoteStore as RemoteStore,
    Store as Store,
    Stored as Stored,
    Writable as Writable,
    changed_object as changed_object,
    checked_name as checked_name,
    etag_of as etag_of,
    is_inside as is_inside,
    is_utf8 as is_utf8,
    missing_object as missing_object,
    read_object as read_object,
    read_range as read_range,
    read_text as read_text,
    refuse_beyond as refuse_beyond,
    refuse_other_length as refuse_other_length,
)
from .stores import (
    is_url as is_url,
    schemes as schemes,
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
from .verify_files import (
    PartDigests as PartDigests,
    compare_digests as compare_digests,
    digest_problems as digest_problems,
    digest_shares as digest_shares,
    share_files as share_files,
)
from .whole_files import (
    is_cold as is_cold,
    read_whole as read_whole,
)
from .writer import (
    DurableFile as DurableFile,
    Region as Region,
    Writer as Writer,
    WriteTuning as WriteTuning,
    digest_regions as digest_regions,
    region_of as region_of,
    tuning_for as tuning_for,
)
