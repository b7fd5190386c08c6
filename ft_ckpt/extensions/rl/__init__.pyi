from .exporting import (
    export as export,
)
from .follow import (
    PendingPublish as PendingPublish,
    Publisher as Publisher,
    follow_run as follow_run,
)
from .frontier import (
    Frontier as Frontier,
)
from .options import (
    ServerOptions as ServerOptions,
    ServerSettings as ServerSettings,
    server_options as server_options,
)
from .preflight import (
    check_for as check_for,
)
from .publish_reports import (
    PublishReport as PublishReport,
)
from .publishing import (
    publish as publish,
)
from .session import (
    LastCheckpoint as LastCheckpoint,
    OpenSession as OpenSession,
    check_writer_names as check_writer_names,
    open_session as open_session,
    parts_of as parts_of,
)
from .writer import (
    Writer as Writer,
)
