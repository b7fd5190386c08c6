from .every import (
    SIGNALS as SIGNALS,
    Every as Every,
)
from .history import (
    History as History,
    after_commit as after_commit,
    after_save as after_save,
    after_step as after_step,
    begin_history as begin_history,
)
from .intervals import (
    bounded_interval as bounded_interval,
    expected_overhead as expected_overhead,
    optimal_interval as optimal_interval,
    parse_seconds as parse_seconds,
)
from .reasons import (
    interval_seconds as interval_seconds,
    needs_poll as needs_poll,
    next_poll as next_poll,
    own_reason as own_reason,
    shared_reason as shared_reason,
)
from .save_log import (
    LoggedSave as LoggedSave,
    append_save as append_save,
    finish_last as finish_last,
    log_from_json as log_from_json,
    log_to_json as log_to_json,
)
