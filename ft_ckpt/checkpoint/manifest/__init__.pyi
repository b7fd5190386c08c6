from .cards import (
    CARD_NAME as CARD_NAME,
    is_hub_name as is_hub_name,
    is_other_version as is_other_version,
    with_current_cards as with_current_cards,
)
from .contents import (
    ACCELERATE_MARKER as ACCELERATE_MARKER,
    CHECKPOINT as CHECKPOINT,
    RUN as RUN,
    RUNS as RUNS,
    UNREADABLE as UNREADABLE,
    Contents as Contents,
    class_in as class_in,
    describe_contents as describe_contents,
    document_in as document_in,
    visible_folders as visible_folders,
    why_no_checkpoint as why_no_checkpoint,
)
from .manifest import (
    DIFFUSERS_LORA_FILE as DIFFUSERS_LORA_FILE,
    DIFFUSERS_MODEL_FILE as DIFFUSERS_MODEL_FILE,
    MANIFEST_LIMIT_BYTES as MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME as MANIFEST_NAME,
    BaseRecord as BaseRecord,
    Manifest as Manifest,
    PartRecord as PartRecord,
    age_of as age_of,
    check_paths as check_paths,
    content_identity as content_identity,
    manifest_from_json as manifest_from_json,
    manifest_to_json as manifest_to_json,
    parse_time as parse_time,
)
from .misleading import (
    is_misleading as is_misleading,
    misleading_files as misleading_files,
    misleading_problem as misleading_problem,
)
from .stored_manifest import (
    is_delta as is_delta,
    load_manifest as load_manifest,
    manifest_text as manifest_text,
    manifest_version as manifest_version,
    next_number as next_number,
    parse_manifest as parse_manifest,
    read_manifest as read_manifest,
)
