from .local_disk import (
    ABANDONED_SECONDS as ABANDONED_SECONDS,
    PREFIX as PREFIX,
    make_folder as make_folder,
)
from .look_ups import (
    folder_mode as folder_mode,
    holds_cwd as holds_cwd,
    holds_mount as holds_mount,
    is_folder as is_folder,
    list_entries as list_entries,
    list_names as list_names,
    permission_bits as permission_bits,
    real_path as real_path,
    regular_descriptor as regular_descriptor,
    walk_tree as walk_tree,
)
from .mounts import (
    Mount as Mount,
    mount_of as mount_of,
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
