from .pickles import (
    PLAIN_VALUES as PLAIN_VALUES,
    OpaqueObject as OpaqueObject,
    Sealed as Sealed,
    StandIn as StandIn,
    stand_in as stand_in,
    unpickle as unpickle,
)
from .raw_file import (
    FREE_BYTES as FREE_BYTES,
    MAP_BYTES as MAP_BYTES,
    FileStream as FileStream,
    RawFile as RawFile,
)
from .reading import (
    THREADS as THREADS,
    DeviceTensors as DeviceTensors,
    Landing as Landing,
    StraightLanding as StraightLanding,
    bytes_at as bytes_at,
    copy_bytes as copy_bytes,
    read_onto as read_onto,
    read_runs as read_runs,
    whole_run as whole_run,
)
from .tensor_file import (
    JoinedFile as JoinedFile,
    ListedFile as ListedFile,
    MemoryFile as MemoryFile,
    StoredTensor as StoredTensor,
    TensorFile as TensorFile,
    TensorView as TensorView,
)
from .zip_records import (
    ZIP_MAGIC as ZIP_MAGIC,
    record_span as record_span,
)
