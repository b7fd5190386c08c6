from .session_files import (
    check_writer_names as check_writer_names,
    files_by_writer as files_by_writer,
)
from .writer import (
    Writer as Writer,
)
