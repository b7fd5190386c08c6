"""Reads the responses of inference servers: models, versions, digests, refusals."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines.client import Answer, Client


@dataclass(frozen=True)
class Served:
    """The models that a server lists.

    Attributes:
        base: The name of the base model.
        base_path: The path from which the server loaded the base model, if it reports it.
        adapters: The path of each adapter by name, or None if the server does not report it.
    """

    base: str
    base_path: str | None
    adapters: Mapping[str, str | None]


def is_object(answer: Answer) -> bool:
    """Check whether the response is a success with a JSON object."""
    return answer.is_success and isinstance(answer.document, dict)


def first_object(client: Client, *paths: str) -> str | None:
    """Return the first of `paths` that answers with a JSON object, or None."""
    for path in paths:
        if is_object(client.get(path)):
            return path
    return None


def version_at(client: Client, path: str) -> str:
    """Return the version of the engine that `path` reports, or "unknown"."""
    document = client.get(path).document
    if not isinstance(document, dict):
        return "unknown"
    return str(document.get("version", "unknown"))


def _is_refusal(answer: Answer) -> bool:
    if not answer.is_success:
        return True
    return is_object(answer) and answer.document.get("success") is False


def says_loaded(answer: Answer) -> bool:
    """Check whether an adapter was not loaded because one of its name is loaded already."""
    return _is_refusal(answer) and "already" in answer.text and "loaded" in answer.text


def says_not_loaded(answer: Answer) -> bool:
    """Check whether an adapter was not unloaded because none of its name is loaded."""
    says_none = "not loaded" in answer.text or "does not exist" in answer.text
    return _is_refusal(answer) and says_none


def served_models(client: Client) -> Served:
    """Request the list of models. Raises EngineError if it is empty or refused.

    The first model without a parent is the base. Models with a parent are adapters.
    """
    listed = listed_models(client.expect(client.get("/v1/models"), "its list of models"))
    models = [model for model in listed if isinstance(model.get("id"), str)]
    if not models:
        raise EngineError(f"{client.url}: lists no model; is it still starting?")
    bases = [model for model in models if not model.get("parent")]
    base = bases[0] if bases else models[0]
    adapters = {model["id"]: _root_of(model) for model in models if model.get("parent")}
    return Served(base["id"], _root_of(base), adapters)


def _root_of(model: Mapping[str, Any]) -> str | None:
    root = model.get("root")
    return root if isinstance(root, str) else None


def listed_models(answer: Answer) -> list[dict[str, Any]]:
    """Return the entries of a list of models."""
    entries = answer.document.get("data") if isinstance(answer.document, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def weight_version_at(client: Client, *paths: str) -> str | None:
    """Return the version of the weights at the first of `paths` that reports one, or None."""
    for path in paths:
        answer = client.get(path)
        if answer.is_absent:
            continue
        document = client.expect(answer, "the version of its weights").document
        version = document.get("weight_version") if isinstance(document, dict) else None
        if version is not None:
            return str(version)
    return None


def digests_of(client: Client, answer: Answer) -> dict[str, str] | None:
    """Return the digests in a response; see `Server.digests`."""
    if answer.is_absent:
        return None
    if answer.status == 409:
        return {}
    document = client.expect(answer, "the digests of its parameters").document
    digests = dict(_digests_in(document))
    if not digests:
        raise EngineError(
            f"{client.url}: the digests of its parameters: none in its answer: {answer.quoted}"
        )
    return digests


def _digests_in(value: Any, ranks: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, digest) for the digests below "checksums" at any depth.

    Each rank of SGLang answers with an object of its own, whose ranks become a prefix of the names.
    """
    if isinstance(value, list):
        for rank, entry in enumerate(value):
            yield from _digests_in(entry, f"tp{rank}:")
    elif isinstance(value, dict):
        info = value.get("parallelism_info")
        if isinstance(info, dict):
            ranks = "".join(f"{kind}{info.get(f'{kind}_rank', 0)}:" for kind in ("dp", "pp", "tp"))
        sums = value.get("checksums")
        if isinstance(sums, dict):
            for name, digest in sums.items():
                if isinstance(digest, str):
                    yield f"{ranks}{name}", digest.lower()
        else:
            for entry in value.values():
                yield from _digests_in(entry, ranks)
