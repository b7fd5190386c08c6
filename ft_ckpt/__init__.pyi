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
    average as average,
    convert as convert,
    load as load,
    merge as merge,
    save as save,
)
from .extensions.transfer import (
    CopyReport as CopyReport,
    PendingPush as PendingPush,
    PullReport as PullReport,
    PushReport as PushReport,
    SyncReport as SyncReport,
    copy as copy,
    pull as pull,
    push as push,
    sign as sign,
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
