from .open_chosen import (
    open_for_all as open_for_all,
)
from .opening import (
    ResumePoint as ResumePoint,
    open_resume_point as open_resume_point,
)
from .request import (
    ResumeRequest as ResumeRequest,
    parse_mode as parse_mode,
)
from .restore_items import (
    restore_weights as restore_weights,
)
from .resuming import (
    resume_run as resume_run,
)
