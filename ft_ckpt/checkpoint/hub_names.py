"""Tells names of models on the Hub from paths of this machine."""

from pathlib import Path

from ft_ckpt.storage.local_store import LocalStore


def is_hub_name(name: str) -> bool:
    """Whether the Hub may have a model of that name, and no folder here has it."""
    from huggingface_hub.errors import HFValidationError  # here, so that listing does not pay for it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not LocalStore(Path(name)).list_folder().exists
