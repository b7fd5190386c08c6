from .extension_parts import (
    UploadTerms as UploadTerms,
)
from .follow_up import (
    SaveHook as SaveHook,
    hooks_of as hooks_of,
    make_follow_up as make_follow_up,
)
from .run_saves import (
    RunSaves as RunSaves,
)
