"""Copies a checkpoint between two places of any kinds that keep it as it is."""

from ft_ckpt.extensions.transfer.endpoints import PlaceLike, copy_endpoint_of
from ft_ckpt.extensions.transfer.reports import CopyReport


def copy(source: PlaceLike, destination: PlaceLike, *, overwrite: bool = False) -> CopyReport:
    """Copy the committed checkpoint `source` to `destination`.

    Both are paths or URLs, also of different buckets. The name of the source is appended to a
    destination that ends in a slash. All digests are compared on the way, the manifest is written
    last. Files of 1 MiB or more that one of the newest checkpoints beside the destination has are
    not sent again: they are hard-linked and read there, or copied by the service. A signature is
    copied, see `sign`; pins and leases are not. A failed copy leaves no checkpoint; the next one
    starts from the beginning. If the same checkpoint is there already, nothing changes.

    From a bucket of the Hub ("hf://buckets/user/name/folder") a checkpoint is copied to a disk
    only. Into one, the files are sent in one batch, and then the manifest; with `overwrite`, there
    is no checkpoint meanwhile.

    Raises NotACheckpointError when nothing is committed at `source`, CorruptError when its files
    differ from its manifest, NameTakenError when something else is at `destination` and `overwrite`
    is False, TargetError or NoSpaceError when it cannot be written.
    """
    origin = copy_endpoint_of(source).at(source)
    goal = copy_endpoint_of(destination).at(destination).goal_for(origin.basename)
    return origin.copy_to(goal, overwrite=overwrite)
