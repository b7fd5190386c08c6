from .fields import (
    check_position as check_position,
)
from .position import (
    DataPosition as DataPosition,
)
from .positions import (
    DataPositions as DataPositions,
    describe_data as describe_data,
    position_in_state as position_in_state,
)
from .rng import (
    GeneratorStates as GeneratorStates,
    capture_generators as capture_generators,
    generator_problems as generator_problems,
    plain_states as plain_states,
    restore_generators as restore_generators,
)
