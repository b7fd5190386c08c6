"""Who may read a new file or folder: nobody who could not read what it is made of. Pure."""

import stat
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Access:
    """The most that the permission bits of new files and folders may be; the umask takes more of them away.

    The bits for the group are about `group`: in another one they go no further than those for everybody.
    """

    file_bits: int = 0o777
    folder_bits: int = 0o777
    group: int | None = None  # None: whatever the group

    def __and__(self, other: "Access") -> "Access":
        """The access to what is made of both."""
        group = other.group if self.group is None else self.group
        one, two = self.in_group(group), other.in_group(group)
        return Access(one.file_bits & two.file_bits, one.folder_bits & two.folder_bits, group)

    def in_group(self, group: int | None) -> "Access":
        """The same in another group."""
        if self.group in (None, group):
            return self
        return Access(_for_anyone(self.file_bits), _for_anyone(self.folder_bits), group)

    @property
    def for_file(self) -> "Access":
        """The same for a file that leaves the folder: only those may read it who may enter that."""
        inside = sum(0o7 << shift for shift in (0, 3, 6) if self.folder_bits >> shift & 1)
        return replace(self, file_bits=self.file_bits & inside | stat.S_IRUSR)


FREE = Access()  # the umask alone decides


def file_access(mode: int, group: int) -> Access:
    """The access to a file; its owner may always read it."""
    return Access(mode & 0o777 | stat.S_IRUSR, 0o777, group)


def folder_access(mode: int, group: int) -> Access:
    """The access to a folder, whatever files are in it."""
    return Access(0o777, mode & 0o777, group)


def _for_anyone(bits: int) -> int:
    """The bits where group and others are other people: what both may do."""
    both = bits >> 3 & bits & 0o7
    return bits & ~0o077 | both << 3 | both
