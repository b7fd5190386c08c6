from .diffusers import (
    diffusers_class as diffusers_class,
    empty_of_config as empty_of_config,
    is_diffusers as is_diffusers,
    model_on_file as model_on_file,
    write_config as write_config,
)
from .making import (
    limit_parameters as limit_parameters,
    listing_own as listing_own,
    without_memory as without_memory,
)
from .on_meta import (
    Shapes as Shapes,
    read_config as read_config,
    shapes_of_new as shapes_of_new,
)
from .pretrained import (
    add_folder_settings as add_folder_settings,
    add_origin as add_origin,
    checked_config as checked_config,
    class_of_own_code as class_of_own_code,
    empty_model as empty_model,
    is_converted as is_converted,
    max_parameters as max_parameters,
    part_folder as part_folder,
    transformers_class as transformers_class,
)
