from .blocks import (
    ALIGNMENT as ALIGNMENT,
    BLOCK_BYTES as BLOCK_BYTES,
    Block as Block,
    BlockAllocator as BlockAllocator,
    Memory as Memory,
    address_of as address_of,
    new_block as new_block,
    new_block_of as new_block_of,
)
from .direct_io import (
    LocalWriting as LocalWriting,
    allocate_file as allocate_file,
    allocate_space as allocate_space,
    create_file as create_file,
)
from .local_file import (
    LocalFile as LocalFile,
    MappedBytes as MappedBytes,
    open_local_file as open_local_file,
)
from .prefetch import (
    ByteRun as ByteRun,
    is_in_page_cache as is_in_page_cache,
    read_ahead as read_ahead,
    read_in_place as read_in_place,
)
from .whole_files import (
    is_cold as is_cold,
    read_whole as read_whole,
)
from .writer import (
    FileWriter as FileWriter,
    Region as Region,
    WriterPool as WriterPool,
    WriteTuning as WriteTuning,
    digest_regions as digest_regions,
    region_of as region_of,
    tuning_for as tuning_for,
)
