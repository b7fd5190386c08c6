from .digests import (
    SMALL_BYTES as SMALL_BYTES,
    RunningDigest as RunningDigest,
    digest_of_bytes as digest_of_bytes,
    digest_of_open as digest_of_open,
    joined_digest as joined_digest,
    read_record as read_record,
    record_of as record_of,
    whole_digest as whole_digest,
)
from .records import (
    Cut as Cut,
    FileRecord as FileRecord,
    chunk_of_rank as chunk_of_rank,
    cut_chunks as cut_chunks,
    owned_parts as owned_parts,
    rank_parts as rank_parts,
    size_problem as size_problem,
    unread_problem as unread_problem,
)
from .verify_files import (
    FileShare as FileShare,
    ShareDigests as ShareDigests,
    compare_digests as compare_digests,
    digest_problems as digest_problems,
    digest_shares as digest_shares,
    share_files as share_files,
)
