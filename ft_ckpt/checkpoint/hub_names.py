"""Names of models on the Hugging Face Hub."""

from pathlib import Path

from ft_ckpt.storage.local import LocalStore


def is_hub_name(name: str) -> bool:
    """Whether `name` is a valid model id of the Hub, and not a local folder."""
    from huggingface_hub.errors import HFValidationError  # lazily: `ft-ckpt ls` does not need it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not LocalStore(Path(name)).list_folder().exists
