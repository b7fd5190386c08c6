"""The HTTP endpoints of inference servers that can be published to: vLLM, SGLang, and servers with
SGLang's endpoints.

Only paths, names and plain JSON are sent: the endpoints for tensors take pickles. Sources: vLLM
0.22 to 0.32 (entrypoints/serve/dev/rlhf, entrypoints/serve/lora, docs/training/weight_checker.md),
SGLang (docs/advanced_features/sglang_for_rl.md and lora). vLLM has the endpoints for weights with
VLLM_SERVER_DEV_MODE=1, those for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
--enable-lora.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ft_ckpt.errors import ConfigError, EngineError
from ft_ckpt.extensions.rl.client import Answer, Client

# token ids in every vocabulary
PROBE_PROMPTS = ((3, 5, 7, 11, 13), (2, 9, 4, 16, 8), (17, 6, 1, 10, 12))
_TOP = 5  # tokens whose log probabilities are compared; servers return 5 by default


@dataclass(frozen=True)
class Served:
    """The models that a server lists."""

    base: str  # name of its base model
    base_path: str | None  # from which the server loaded it
    # path of each adapter by name; None if the server does not report it
    adapters: Mapping[str, str | None]


class Server(Protocol):
    """One running server.

    Every method raises EngineError when the server refuses or does not answer.
    """

    @property
    def client(self) -> Client: ...

    @property
    def engine(self) -> str: ...  # "vLLM" or "SGLang"

    @property
    def version(self) -> str: ...

    def served(self) -> Served:
        """The models it lists."""
        ...

    def model_name(self, base: str, adapter: str) -> str:
        """The model name in requests to an adapter on the served `base`."""
        ...

    def load_adapter(self, name: str, path: str) -> bool:
        """Load the adapter in the folder `path` on the server; False if one of this name is loaded
        already.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload the adapter; no error if it is not loaded."""
        ...

    def weight_version(self) -> str | None:
        """The version of the weights that the server reports; None if it reports none."""
        ...

    def set_weight_version(self, version: str) -> None:
        """Set the version that the server reports."""
        ...

    def is_paused(self) -> bool:
        """Whether generation is paused; False if the server does not report it."""
        ...

    def pause(self, in_flight: str) -> None:
        """Stop generation; `in_flight` requests: "wait", "keep" or "abort"."""
        ...

    def resume(self) -> None:
        """Resume generation; no error if it is not paused."""
        ...

    def load_weights(self, path: str) -> None:
        """Load full weights in place from the folder `path` on the server; then drop all caches."""
        ...

    def drop_caches(self) -> None:
        """Drop the cached states of earlier prompts, if the server has an endpoint for it."""
        ...

    def digests(self) -> Mapping[str, str] | None:
        """A digest of each parameter by name, with its ranks as prefix ("tp0:..."): SHA-256 in
        vLLM, others in SGLang.

        None if the server has no such endpoint; empty if it is paused and does not compute them
        now.
        """
        ...


def connect(client: Client) -> Server:
    """The server at an address, identified by its responses.

    Raises EngineError if no server answers, or it refuses now; ConfigError for a server that cannot
    be published to.
    """
    models = client.get("/v1/models")
    if not models.is_absent:
        client.expect(models, "its list of models")
    owners = set()
    if models.is_success:
        owners = {str(model.get("owned_by", "")).lower() for model in _listed(models)}
    for owner, advice in _REFUSED.items():
        if owner in owners:
            raise ConfigError(f"{client.url}: {advice}")
    if "vllm" in owners:
        return VLLM(client, _version(client, "/version"))
    information = _first_object(client, "/server_info", "/get_server_info")
    if "sglang" in owners or information is not None:
        return SGLang(client, _version(client, information or "/server_info"))
    for path, word, advice in _PROBES:
        answer = client.get(path)
        if answer.is_success and word in answer.text.lower():
            raise ConfigError(f"{client.url}: {advice}")
    raise ConfigError(
        f"{client.url}: no server that can be published to answers there (/v1/models: "
        f"{models.quoted}); expected vLLM, SGLang or a server with SGLang's calls"
    )


_LLAMA_CPP = (
    "llama.cpp reads adapters and weights when it starts; convert a merged model to GGUF and "
    "start it anew"
)
_OLLAMA = (
    "ollama makes models from GGUF files: merge the adapter, convert the result to GGUF, and "
    "`ollama create`"
)
_TGI = (
    "TGI reads adapters when it starts (LORA_ADAPTERS=name=path); start it anew, or serve with "
    "vLLM or SGLang"
)
_REFUSED = {  # "owned_by" in its list of models: the advice
    "llamacpp": _LLAMA_CPP,
    "library": _OLLAMA,
    "lmdeploy": (
        "LMDeploy takes weights as serialised tensors only, from its own machine; serve with "
        "vLLM or SGLang"
    ),
    "tensorrt_llm": (
        "TensorRT-LLM takes no new weights over HTTP; adapters are named per request; start it anew"
    ),
}
_PROBES = (
    ("/api/version", "version", _OLLAMA),
    ("/info", "model_id", _TGI),
    ("/props", "chat_template", _LLAMA_CPP),
)


def _is_object(answer: Answer) -> bool:
    return answer.is_success and isinstance(answer.document, dict)


def _first_object(client: Client, *paths: str) -> str | None:
    """The first of `paths` that answers with a JSON object."""
    for path in paths:
        if _is_object(client.get(path)):
            return path
    return None


def _version(client: Client, path: str) -> str:
    document = client.get(path).document
    return str(document.get("version", "unknown")) if isinstance(document, dict) else "unknown"


def _is_refusal(answer: Answer) -> bool:
    if not answer.is_success:
        return True
    return _is_object(answer) and answer.document.get("success") is False


def _has_loaded(answer: Answer) -> bool:
    """Whether a refusal to load an adapter says that its name is loaded, as by another publisher
    just now.
    """
    return _is_refusal(answer) and "already" in answer.text and "loaded" in answer.text


def _has_none(answer: Answer) -> bool:
    """Whether a refusal to unload an adapter says that none of its name is loaded."""
    says_none = "not loaded" in answer.text or "does not exist" in answer.text
    return _is_refusal(answer) and says_none


def probe(server: Server, model: str) -> list[list[float]]:
    """The highest log probabilities of the first token after each of PROBE_PROMPTS, largest
    first.
    """
    answers = []
    for prompt in PROBE_PROMPTS:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": _TOP,
        }
        answer = server.client.expect(
            server.client.post("/v1/completions", body), f"a completion by {model!r}"
        )
        try:
            top = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
            numbers = sorted(map(float, top.values()), reverse=True)[:_TOP]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):  # every comparison with NaN passes
            raise EngineError(
                f"{server.client.url}: a completion by {model!r} has no finite log probabilities: "
                f"{answer.quoted}"
            )
        answers.append(numbers)
    return answers


def _served(client: Client) -> Served:
    listed = _listed(client.expect(client.get("/v1/models"), "its list of models"))
    models = [model for model in listed if isinstance(model.get("id"), str)]
    if not models:
        raise EngineError(f"{client.url}: lists no model; is it still starting?")
    bases = [model for model in models if not model.get("parent")]
    base = bases[0] if bases else models[0]
    adapters = {model["id"]: _root_of(model) for model in models if model.get("parent")}
    return Served(base["id"], _root_of(base), adapters)


def _root_of(model: Mapping[str, Any]) -> str | None:
    """The path that the server reports for a model."""
    root = model.get("root")
    return root if isinstance(root, str) else None


def _listed(answer: Answer) -> list[dict[str, Any]]:
    """The entries of a list of models."""
    entries = answer.document.get("data") if isinstance(answer.document, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


@dataclass(frozen=True)
class VLLM:
    """A server of vLLM."""

    client: Client
    version: str
    engine: str = field(default="vLLM", init=False)

    def served(self) -> Served:
        return _served(self.client)

    def model_name(self, base: str, adapter: str) -> str:
        return adapter

    def load_adapter(self, name: str, path: str) -> bool:
        # "load_inplace" reads the disk at each step, and a reused name answers from the old cache
        body = {"lora_name": name, "lora_path": path}
        answer = self._post(
            "/v1/load_lora_adapter", f"adapter {name!r} from {path}", body, passes=_has_loaded
        )
        return answer.is_success

    def unload_adapter(self, name: str) -> None:
        answer = self.client.post("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status != 404:
            self.client.expect(answer, f"unloading adapter {name!r}")

    def weight_version(self) -> str | None:
        return _weight_version(self.client, "/weight_info")

    def set_weight_version(self, version: str) -> None:
        self._post("/update_weight_version", "its version", {"new_version": version})

    def is_paused(self) -> bool:
        answer = self.client.get("/is_paused")
        if not answer.is_absent:
            self.client.expect(answer, "whether it is paused")
        return _is_object(answer) and answer.document.get("is_paused") is True

    def pause(self, in_flight: str) -> None:
        self._post("/pause", "pausing", mode=in_flight)

    def resume(self) -> None:
        answer = self.client.post("/resume")
        # without the endpoints it cannot have been paused
        if not answer.is_absent or self.is_paused():
            self.client.expect(answer, "resuming")

    def load_weights(self, path: str) -> None:
        arguments = {"weights_path": path, "is_checkpoint_format": True}
        self._post(
            "/collective_rpc",
            f"weights from {path}",
            {"method": "reload_weights", "kwargs": arguments},
        )
        self.drop_caches()

    def drop_caches(self) -> None:
        # blocks of requests kept by a pause are dropped and recomputed, too
        for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
            answer = self.client.post(path, reset_running_requests="true")
            if not answer.is_absent:  # versions differ in these endpoints
                self.client.expect(answer, f"dropping its caches ({path})")
            if _is_object(answer) and answer.document.get("success") is False:
                raise EngineError(
                    f"{self.client.url}: {path}: not dropped; it would answer from the old weights"
                )

    def digests(self) -> Mapping[str, str] | None:
        answer = self.client.post("/weight_checker", {"action": "checksum"})
        return _digests(self.client, answer)

    def _post(
        self,
        path: str,
        action: str,
        body: Mapping[str, Any] | None = None,
        passes: Callable[[Answer], bool] = lambda _: False,
        **query: str,
    ) -> Answer:
        answer = self.client.post(path, body, **query)
        if passes(answer):
            return answer
        if answer.status == 404 and answer.document in (None, {"detail": "Not Found"}):
            raise EngineError(
                f"{self.client.url}: {action}: it has no {path}; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for adapters, with "
                "VLLM_SERVER_DEV_MODE=1 for weights"
            )
        return self.client.expect(answer, action)


# Retracted requests are recomputed from their tokens; "in_place" would keep the cache of the old
# weights
_SGLANG_MODES = {"wait": "retract", "keep": "retract", "abort": "abort"}


@dataclass(frozen=True)
class SGLang:
    """A server of SGLang, or one with its endpoints."""

    client: Client
    version: str
    engine: str = field(default="SGLang", init=False)

    def served(self) -> Served:
        return _served(self.client)

    def model_name(self, base: str, adapter: str) -> str:
        return f"{base}:{adapter}"  # the base answers a name without a colon

    def load_adapter(self, name: str, path: str) -> bool:
        body = {"lora_name": name, "lora_path": path}
        answer = self._post(
            "/load_lora_adapter", f"adapter {name!r} from {path}", body, passes=_has_loaded
        )
        return not _has_loaded(answer)

    def unload_adapter(self, name: str) -> None:
        # asked even if its list has no such adapter: it may be loaded all the same
        body = {"lora_name": name}
        self._post("/unload_lora_adapter", f"unloading adapter {name!r}", body, passes=_has_none)

    def weight_version(self) -> str | None:
        return _weight_version(self.client, "/get_weight_version", "/model_info", "/get_model_info")

    def set_weight_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._post("/update_weight_version", "its version", body)

    def is_paused(self) -> bool:
        return False

    def pause(self, in_flight: str) -> None:
        self._post("/pause_generation", "pausing", {"mode": _SGLANG_MODES[in_flight]})

    def resume(self) -> None:
        self._post("/continue_generation", "resuming")

    def load_weights(self, path: str) -> None:
        body = {
            "model_path": path,
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        self._post("/update_weights_from_disk", f"weights from {path}", body)

    def drop_caches(self) -> None:
        """Nothing to do: loading weights drops the caches, and those of adapters are keyed by load,
        not by name.
        """

    def digests(self) -> Mapping[str, str] | None:
        answer = self.client.post("/weights_checker", {"action": "checksum"})
        # 400: it has no such action
        return None if answer.status == 400 else _digests(self.client, answer)

    def _post(
        self,
        path: str,
        action: str,
        body: Mapping[str, Any] | None = None,
        passes: Callable[[Answer], bool] = lambda _: False,
    ) -> Answer:
        answer = self.client.post(path, body)
        if passes(answer):
            return answer
        document = self.client.expect(answer, action).document
        if isinstance(document, dict) and document.get("success") is False:
            raise EngineError(f"{self.client.url}: {action}: refused: {answer.quoted}")
        return answer


def _weight_version(client: Client, *paths: str) -> str | None:
    """The version at the first of `paths` that reports one; None if none does."""
    for path in paths:
        answer = client.get(path)
        if answer.is_absent:
            continue
        document = client.expect(answer, "the version of its weights").document
        version = document.get("weight_version") if isinstance(document, dict) else None
        if version is not None:
            return str(version)
    return None


def _digests(client: Client, answer: Answer) -> dict[str, str] | None:
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
    """The digests below "checksums" at any depth, by name: each rank of SGLang answers with its own
    object.
    """
    if isinstance(value, list):
        for rank, entry in enumerate(value):
            yield from _digests_in(entry, f"tp{rank}:")
    elif isinstance(value, dict):
        place = value.get("parallelism_info")
        if isinstance(place, dict):
            ranks = "".join(f"{kind}{place.get(f'{kind}_rank', 0)}:" for kind in ("dp", "pp", "tp"))
        sums = value.get("checksums")
        if isinstance(sums, dict):
            for name, digest in sums.items():
                if isinstance(digest, str):
                    yield f"{ranks}{name}", digest.lower()
        else:
            for entry in value.values():
                yield from _digests_in(entry, ranks)
