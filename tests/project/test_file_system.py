"""Which modules know the file system; all others ask a store, or hand a path on to one of these.

A module knows it when it imports what only files need, calls what of `os` is about files, calls
`open`, or calls what only paths have (`is_file`, `iterdir`, `read_text`, ...).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "ft_ckpt"
IMPORTS = {
    *("fcntl", "glob", "mmap", "shutil", "tempfile"),
    *("ft_ckpt.storage.local_disk", "ft_ckpt.storage.look_ups"),
}
# The operations on files that other packages import by the fronts of `storage`.
OPERATIONS = {
    *(
        f"ft_ckpt.storage.{name}"
        for name in ("list_names", "make_folder", "permission_bits", "regular_descriptor")
    ),
    *(f"ft_ckpt.storage.{name}" for name in ("holds_cwd", "holds_mount", "is_folder", "real_path")),
    "ft_ckpt.storage.walk_tree",
    "ft_ckpt.storage.local.clear_drafts",
    "ft_ckpt.storage.local.make_locked_folder",
}
HARMLESS = {
    *("PathLike", "fspath", "fsencode", "fsdecode", "pathsep", "sep"),  # names of files
    *(
        "environ",
        "getenv",
        "getpid",
        "getppid",
        "getuid",
        "kill",
        "register_at_fork",
        "urandom",
        "strerror",
    ),
    *("PRIO_PROCESS", "cpu_count", "getpriority", "sched_getaffinity", "setpriority"),
    *("_exit", "killpg", "sysconf", "SEEK_END"),
}
OF_PATHS = {
    *("exists", "is_dir", "is_file", "is_symlink", "lstat", "samefile", "glob", "iterdir", "rglob"),
    *("hardlink_to", "mkdir", "readlink", "rmdir", "symlink_to", "touch", "unlink"),
    *("read_bytes", "read_text", "write_bytes", "write_text"),
}

# The floor: what a store and the fast road beside it are made of.
STORAGE = {
    "io/blocks",
    "io/direct_io",
    "io/local_file",
    "io/prefetch",
    "io/whole_files",
    "libc",
    "local/local_store",
    "local/locks",
    "local_disk",
    "look_ups",
    "mounts",
}
# Paths as places; checks of links; files for libraries that want paths; trials of a file system.
STORAGE |= {"local/inside", "local/trials", "places/copies", "places/place"}
# The commit protocol of folders, its recovery and its opposite, locks of readers and runs, and open
# files kept open.
CHECKPOINT = {
    "commit/commit",
    "commit/delete",
    "commit/recovery",
    "leases/reader_leases",
    "open_folder",
    "opening",
}
# A folder for a trainer class that writes files, with links to the neighbours of the checkpoint.
TRAINERS = {"integrations/trainer_layout"}
# Signatures of folders on a disk, by a library that reads paths; a signature beside a copy.
SIGNATURES = {
    "extensions/transfer/copies/signing",
    "checkpoint/checks/signature",
    "extensions/transfer/copies/signatures",
}
# Repositories and buckets of the Hub, by a library that takes paths and patterns of names.
HUB = {"extensions/transfer/hub/repositories", "extensions/transfer/hub/buckets"}
# What the clients of a network file system cache, tried on the disk itself.
CACHES = {"cli/cache_trials"}
# What the system says of processes, as files.
PROCESSES = {"processes"}
# Standard output.
STREAMS = {"cli/options"}
# Accelerate reads its folders itself, and nodes that see no checkpoint get one in their temporary
# folder.
TRAINING = {
    "extensions/foreign/accelerate_files",
    "extensions/foreign/accelerate_folder",
    "runs/resume/node_copies",
    "runs/folder/lease",
}
# Whether a word that is no command is the name of a file.
WORDS = {"cli/__init__"}


def signs(tree: ast.Module) -> Iterator[str]:
    """What in a module is about files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in IMPORTS)
        elif isinstance(node, ast.ImportFrom):
            # a check of text, and two constants
            harmless = {"local_path", "PREFIX", "ABANDONED_SECONDS"}
            names = {
                f"{node.module}.{each.name}" for each in node.names if each.name not in harmless
            }
            yield from {node.module, *names} & (IMPORTS | OPERATIONS) if names else ()
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            yield from {node.attr} - HARMLESS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from {node.func.attr} & OF_PATHS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from {node.func.id} & {"open"}


def test_who_knows_the_file_system():
    found = {
        path.relative_to(ROOT).with_suffix("").as_posix(): sorted(
            set(signs(ast.parse(path.read_text())))
        )
        for path in ROOT.rglob("*.py")
    }
    known = {name: why for name, why in found.items() if why}
    allowed = (
        {f"storage/{name}" for name in STORAGE}
        | {f"checkpoint/{name}" for name in CHECKPOINT}
        | SIGNATURES
        | TRAINERS
        | CACHES
        | PROCESSES
    )
    assert {
        name: why
        for name, why in known.items()
        if name not in allowed | STREAMS | WORDS | TRAINING | HUB
    } == {}, "ask a store"
    assert allowed - known.keys() == set(), "no longer: take them off the list"
