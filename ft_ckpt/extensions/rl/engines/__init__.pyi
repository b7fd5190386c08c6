from .answers import (
    EQUAL_WITHIN as EQUAL_WITHIN,
    PROBE_PROMPTS as PROBE_PROMPTS,
    ROUNDING as ROUNDING,
    Answers as Answers,
    distance as distance,
    probe as probe,
)
from .client import (
    Client as Client,
)
from .connecting import (
    connect as connect,
)
from .expected_digests import (
    DigestComparison as DigestComparison,
    PackedLayer as PackedLayer,
    compare_digests as compare_digests,
    is_known as is_known,
    is_unreported as is_unreported,
    packed_layers as packed_layers,
)
from .options import (
    ServerOptions as ServerOptions,
    ServerSettings as ServerSettings,
    server_options as server_options,
)
from .reference import (
    model_answers as model_answers,
    reference_answers as reference_answers,
)
from .server import (
    Server as Server,
)
