from .reports import (
    PublishReport as PublishReport,
)
from .run_publishers import (
    PendingPublish as PendingPublish,
    Publisher as Publisher,
    follow_run as follow_run,
)
from .steps import (
    publish as publish,
)
