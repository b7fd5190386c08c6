from .publishing import (
    publish as publish,
)
from .reports import (
    PublishReport as PublishReport,
)
from .run_publishers import (
    PendingPublish as PendingPublish,
    Publisher as Publisher,
    follow_run as follow_run,
)
