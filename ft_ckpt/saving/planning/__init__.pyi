from .files import (
    PartPlan as PartPlan,
    check_written_files as check_written_files,
    plan_part as plan_part,
)
from .modes import (
    Mode as Mode,
)
from .plan import (
    BaseSamples as BaseSamples,
    SavePlan as SavePlan,
    plan_save as plan_save,
)
from .replicas import (
    Differences as Differences,
    ReplicaDigest as ReplicaDigest,
    describe_differences as describe_differences,
    difference_note as difference_note,
    differing_boxes as differing_boxes,
    differing_replicas as differing_replicas,
    digest_replicas as digest_replicas,
    digests_by_box as digests_by_box,
    replicated_tensors as replicated_tensors,
)
from .report import (
    PendingSave as PendingSave,
    SaveReport as SaveReport,
)
from .request import (
    STATE_DOCUMENT as STATE_DOCUMENT,
    SaveRequest as SaveRequest,
    StateToSave as StateToSave,
    request_of as request_of,
)
from .sidecars import (
    check_configs as check_configs,
)
from .write_plan import (
    GATHERED as GATHERED,
    FileWrites as FileWrites,
    WritePlan as WritePlan,
    divide_files as divide_files,
    plan_writes as plan_writes,
)
