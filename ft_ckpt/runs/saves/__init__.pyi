from .extension_parts import (
    UploadTerms as UploadTerms,
)
from .follow_up import (
    SaveHook as SaveHook,
    hooks_of as hooks_of,
    open_follow_ups as open_follow_ups,
)
from .run_saves import (
    RunSaves as RunSaves,
)
