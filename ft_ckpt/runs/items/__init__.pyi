from .extra_state import (
    ExtraState as ExtraState,
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
    main_model as main_model,
    optimizer_of as optimizer_of,
    optimizers_among as optimizers_among,
    plain_optimizers as plain_optimizers,
    refuse_unsaveable as refuse_unsaveable,
    run_items as run_items,
)
from .signatures import (
    items_in_saved_order as items_in_saved_order,
    object_signatures as object_signatures,
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
from .watched_models import (
    WatchedModel as WatchedModel,
    changed_models as changed_models,
    differing_models as differing_models,
    watch_model as watch_model,
    watched_digests as watched_digests,
)
