__version__: str

from . import (
    errors as errors,
)
from .checkpoint.catalog import (
    CheckpointInfo as CheckpointInfo,
    best as best,
    latest as latest,
)
from .checkpoint.checks import (
    verify as verify,
)
from .closure import (
    checkpoint_closure as checkpoint_closure,
)
from .config import (
    SaverConfig as SaverConfig,
)
from .extensions.rl.engines import (
    ServerOptions as ServerOptions,
)
from .extensions.rl.limits import (
    check_for as check_for,
    export as export,
)
from .extensions.rl.publishing import (
    PendingPublish as PendingPublish,
    PublishReport as PublishReport,
    publish as publish,
)
from .extensions.rl.samples import (
    Frontier as Frontier,
)
from .extensions.rl.writers import (
    Writer as Writer,
)
from .extensions.tools import (
    load as load,
    save as save,
)
from .extensions.tools.averaging import (
    average as average,
)
from .extensions.tools.converting import (
    convert as convert,
)
from .extensions.tools.merging import (
    merge as merge,
)
from .extensions.transfer.copies import (
    CopyReport as CopyReport,
    PullReport as PullReport,
    PushReport as PushReport,
    SyncReport as SyncReport,
    sign as sign,
)
from .extensions.transfer.sending import (
    PendingPush as PendingPush,
    copy as copy,
    pull as pull,
    push as push,
    sync as sync,
)
from .model.load import (
    LoadReport as LoadReport,
    load_model as load_model,
)
from .retention import (
    Keep as Keep,
)
from .runs.folder import (
    follow as follow,
)
from .runs.state import (
    RestoreReport as RestoreReport,
)
from .saver import (
    CheckpointSaver as CheckpointSaver,
    Progress as Progress,
    SaveReport as SaveReport,
)
from .saving.planning import (
    PendingSave as PendingSave,
)
from .schedule import (
    Every as Every,
)
from .storage.places import (
    Place as Place,
    open_place as open_place,
)
