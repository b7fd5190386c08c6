from .exporting import (
    export as export,
)
from .follow import (
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
from .publisher import (
    PendingPublish as PendingPublish,
    Publisher as Publisher,
)
from .publishing import (
    publish as publish,
)
from .session_files import (
    check_writer_names as check_writer_names,
    parts_of as parts_of,
)
from .writer import (
    Writer as Writer,
)
