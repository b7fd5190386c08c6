from .endpoints import (
    CopyEndpoint as CopyEndpoint,
    Endpoint as Endpoint,
    PlaceLike as PlaceLike,
    PushOptions as PushOptions,
    copy_endpoint_of as copy_endpoint_of,
    endpoint_of as endpoint_of,
    pull_report as pull_report,
    push_report as push_report,
    refuse_options as refuse_options,
)
from .outgoing import (
    OutgoingFiles as OutgoingFiles,
    is_hidden as is_hidden,
    outgoing_files as outgoing_files,
    refuse_damaged as refuse_damaged,
    weights_manifest as weights_manifest,
)
from .stores import (
    StoreEndpoint as StoreEndpoint,
)
