from .extra_state import (
    ModuleExtraState as ModuleExtraState,
)
from .flags import (
    FLAGS as FLAGS,
    changed_flags as changed_flags,
    flags_problem as flags_problem,
    gradient_flags as gradient_flags,
)
from .objects import (
    ENGINE as ENGINE,
    Item as Item,
    bare_identity as bare_identity,
    optimizer_of as optimizer_of,
    optimizers_among as optimizers_among,
)
from .run_objects import (
    RunObjects as RunObjects,
)
from .tensors import (
    Key as Key,
    labelled_sources as labelled_sources,
    model_sources as model_sources,
    run_sources as run_sources,
    tied_names as tied_names,
    walk_models as walk_models,
    walk_run as walk_run,
)
