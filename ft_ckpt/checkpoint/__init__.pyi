from .opening import (
    OpenCheckpoint as OpenCheckpoint,
    checkpoint_around as checkpoint_around,
    files_in as files_in,
    hold_open as hold_open,
    open_checkpoint as open_checkpoint,
    text_identity as text_identity,
)
