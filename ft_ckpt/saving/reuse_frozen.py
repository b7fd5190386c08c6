"""Reuses the files of frozen tensors: the next checkpoint links to those of an earlier one.

Frozen tensors go into files of their own. Before such a file is written, each rank digests the bytes that it would
write. If an earlier checkpoint, of any run, has a file with that digest, it is hard-linked instead, or copied by the
object store. If neither is possible, the file is written.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ft_ckpt.checkpoint.open_checkpoint import EarlierCheckpoint, earlier_checkpoints, take_earlier
from ft_ckpt.checkpoint.staging import Staging
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import CorruptError, TargetError
from ft_ckpt.model.entries import Part
from ft_ckpt.saving import files
from ft_ckpt.saving.files import PartPlan, Share
from ft_ckpt.storage.digests import FileRecord, joined_digest, whole_digest
from ft_ckpt.storage.store import Store, etag_of

LEAST_BYTES = 64 << 20  # of frozen tensors that are worth a second file
LEAST_SHARE = 0.25  # of a part that is worth a second file
_EARLIER = 3  # newest checkpoints to look in: several models may be saved in turns
_LINK = ".ft_ckpt-frozen-"  # prefix of the names of files in a stage that may be reused


@dataclass(frozen=True)
class Offer:
    """Files of earlier checkpoints that a planned file may equal."""

    ranks: int  # whose digests are joined in each digest
    digests: tuple[str, ...]


def frozen_names(part: Part, still: frozenset[int], mode: str) -> frozenset[str]:
    """Stored names of `part` that go into files of their own: those made of `still` tensors only, if that pays."""
    if mode == "off" or not still or part.kind not in ("model", "module"):
        return frozenset()
    names = {entry.name for entry in part.entries if all(source.key in still for source in entry.sources)}
    sizes = {entry.name: torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in part.entries}
    held = sum(sizes[name] for name in names)
    pays = mode == "on" or held >= max(LEAST_BYTES, LEAST_SHARE * sum(sizes.values()))
    return frozenset(names) if pays else frozenset()


def frozen_shares(plans: Iterable[PartPlan], world_size: int) -> list[Share]:
    """The division between ranks of the planned files that hold frozen tensors only."""
    chosen = []
    for plan in plans:
        filled = (file for file in plan.files if file.layout.specs)
        frozen = tuple(file for file in filled if plan.separate.issuperset(spec.name for spec in file.layout.specs))
        if frozen:
            chosen.append(replace(plan, files=frozen))
    return files.divide_files(chosen, world_size)


def link_candidates(shares: Sequence[Share], staging: Staging, ranks: Ranks, gathers: bool) -> dict[str, Offer]:
    """On rank 0: link files of earlier checkpoints with the headers of these into the staging. Returns offers by path.

    `gathers`: whether tensors may be gathered on rank 0 for their digests.
    """
    earlier = list(earlier_checkpoints(staging.beside, _EARLIER)) if shares else []
    offers = {}
    for share in shares:
        taken = [
            record
            for one in earlier
            for record in one.files
            if _is_comparable(record, share, ranks, gathers) and _take_candidate(one, record, share, staging.store)
        ]
        alike = [record.digest for record in taken if record.ranks == taken[0].ranks]
        if alike:
            offers[share.file.path] = Offer(taken[0].ranks, tuple(dict.fromkeys(alike)))
    return offers


def equal_files(shares: Sequence[Share], offers: Mapping[str, Offer], ranks: Ranks) -> dict[str, str]:
    """The digests of the files that equal one of rank 0's `offers`, by path. Collective.

    Each rank digests the bytes that it would write. Tensors are gathered on rank 0 if it alone wrote the earlier file.
    """
    if not offers:
        return {}
    mine = {}
    for share in shares:
        offer = offers.get(share.file.path)
        if offer is not None:
            as_written = share if offer.ranks > 1 else replace(share, cuts=(None,) * len(share.cuts), ranks=1)
            mine[share.file.path] = files.digest_own_bytes(as_written, ranks)

    def equal_to_offers(values: Values) -> dict[str, str]:
        found = {}
        for path, offer in offers.items():
            parts = [value[path] for value in values]
            digest = whole_digest(parts[0]) if offer.ranks == 1 else joined_digest(parts)
            found.update({path: digest} if digest in offer.digests else {})
        return found

    return dict(ranks.agree("the frozen files of save()", mine, decide=equal_to_offers).result)


def place_equal_files(shares: Sequence[Share], taken: Mapping[str, str], store: Store) -> list[FileRecord]:
    """On rank 0: link the files `taken` (path -> digest) to their paths; return their records. Raises TargetError."""
    records = []
    for share in shares:
        path = share.file.path
        if path in taken:
            if not store.copy(_candidate_name(taken[path]), path):
                raise TargetError(f"{store.where(path)}: cannot be linked; set reuse_frozen='off' and save again")
            cuts, size = ((), 1) if taken[path].startswith(whole_digest("")) else (share.actual_cuts, share.ranks)
            etag, size_bytes = etag_of(store, path), share.file.layout.size_bytes
            records.append(FileRecord(path, size_bytes, taken[path], cuts, size, linked=True, etag=etag))
    store.delete(each.name for each in store.list_folder().objects if each.name.startswith(_LINK))
    return records


def _is_comparable(record: FileRecord, share: Share, ranks: Ranks, gathers: bool) -> bool:
    """Whether the file can equal the planned one and these ranks can compute its digest from the elements they hold."""
    if record.size_bytes != share.file.layout.size_bytes:
        return False
    if record.ranks > 1:
        return record.ranks == ranks.size and record.cuts == share.actual_cuts
    return gathers or ranks.size == 1 or not share.needs_transfer


def _take_candidate(one: EarlierCheckpoint, record: FileRecord, share: Share, store: Store) -> bool:
    """Link the earlier file into the stage, see `take_earlier`, unless its header differs from the planned one."""
    name, header = _candidate_name(record.digest), share.file.layout.header
    with suppress(OSError, CorruptError):  # deleted meanwhile, or the store cannot link it
        if store.stat(name) is not None:
            return True
        if take_earlier(one, record, store, name):
            if store.read(name, 0, len(header)) == header:
                return True
            store.delete([name])
    return False


def _candidate_name(digest: str) -> str:
    return _LINK + digest.replace(":", "-")
