from .problems import (
    are_transient as are_transient,
    checkpoint_problems as checkpoint_problems,
    distinct_files as distinct_files,
    file_key as file_key,
    large_files as large_files,
    replaced_problems as replaced_problems,
    retry_transient as retry_transient,
    stored_bytes as stored_bytes,
)
from .signature import (
    SIGNATURE_NAME as SIGNATURE_NAME,
    SignedBy as SignedBy,
    make_signature as make_signature,
    signature_problems as signature_problems,
    unlisted_files as unlisted_files,
)
from .verification import (
    VerifyReport as VerifyReport,
    damage_of as damage_of,
    listing_manifest as listing_manifest,
    verify as verify,
    verify_foreign as verify_foreign,
    verify_listed as verify_listed,
)
