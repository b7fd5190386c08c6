from .copies import (
    SMALL_COPY_BYTES as SMALL_COPY_BYTES,
    LibraryFile as LibraryFile,
    copy_object as copy_object,
    files_below as files_below,
    files_made_by as files_made_by,
    local_folder as local_folder,
    local_version as local_version,
    replaced_object as replaced_object,
    scratch_file as scratch_file,
    scratch_folder as scratch_folder,
    spool_file as spool_file,
)
from .listed_store import (
    ListedStore as ListedStore,
    hold_listed as hold_listed,
)
from .locations import (
    HUB_BUCKETS as HUB_BUCKETS,
    is_url as is_url,
    local_path as local_path,
    location_name as location_name,
    refuse_secrets as refuse_secrets,
    schemes as schemes,
    shown_location as shown_location,
)
from .place import (
    Place as Place,
    absolute_location as absolute_location,
    is_hub_bucket as is_hub_bucket,
    open_place as open_place,
)
