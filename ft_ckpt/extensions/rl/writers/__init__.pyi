from .session_files import (
    check_writer_names as check_writer_names,
    parts_of as parts_of,
)
from .writer import (
    Writer as Writer,
)
