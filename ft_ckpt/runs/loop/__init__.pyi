from .arguments import (
    check_accelerator as check_accelerator,
    check_loop as check_loop,
    check_mappings as check_mappings,
    check_schedule as check_schedule,
    check_tokenizer_argument as check_tokenizer_argument,
    in_words as in_words,
)
from .progress import (
    Progress as Progress,
)
from .signals import (
    exit_code as exit_code,
)
from .training_run import (
    TrainingRun as TrainingRun,
)
from .triggers import (
    END as END,
    VARIABLE as VARIABLE,
    ClockPoll as ClockPoll,
    Rehearsal as Rehearsal,
    Step as Step,
    read_steps as read_steps,
    start_recorder as start_recorder,
)
