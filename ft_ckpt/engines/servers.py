"""The calls of the inference servers that can be published to: vLLM, and SGLang with the servers that copy its calls.

Only paths, names and plain JSON are sent: the calls for tensors take pickles. Sources: vLLM 0.22 to 0.32
(entrypoints/serve/dev/rlhf, entrypoints/serve/lora, docs/training/weight_checker.md), SGLang
(docs/advanced_features/sglang_for_rl.md and lora). vLLM answers the calls for weights with VLLM_SERVER_DEV_MODE=1,
those for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ft_ckpt.engines.client import Answer, Client
from ft_ckpt.errors import ConfigError, EngineError

PROBE_PROMPTS = ((3, 5, 7, 11, 13), (2, 9, 4, 16, 8), (17, 6, 1, 10, 12))  # token ids that every vocabulary has
_TOP = 5  # tokens whose log probabilities are compared; servers give 5 by default


@dataclass(frozen=True)
class Served:
    """The models that a server lists."""

    base: str  # name of its base model
    base_path: str | None  # where the server loaded it from
    adapters: Mapping[str, str | None]  # path of each adapter by name; None where the server does not say


class Server(Protocol):
    """One running server. Every method raises EngineError when the server refuses or does not answer."""

    @property
    def client(self) -> Client: ...

    @property
    def engine(self) -> str: ...  # "vLLM" or "SGLang"

    @property
    def version(self) -> str: ...

    def served(self) -> Served:
        """The models it lists."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path`, as the server sees it, under a new name."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload it; that it is not loaded is no error."""
        ...

    def weight_version(self) -> str | None:
        """The version that the server was last told; None if it has none."""
        ...

    def set_weight_version(self, version: str) -> None:
        """Tell the server a version."""
        ...

    def pause(self, in_flight: str) -> None:
        """Stop generation; `in_flight` requests: "wait", "keep" or "abort"."""
        ...

    def resume(self) -> None:
        """Go on with generation; also where it is not paused."""
        ...

    def load_weights(self, path: str) -> None:
        """Load full weights from the folder `path`, as the server sees it, in place; then drop all caches."""
        ...

    def digests(self) -> Mapping[str, str] | None:
        """SHA-256 of each parameter by name, with the ranks as "tp0:..." before it; None if the server cannot say."""
        ...


def connect(client: Client) -> Server:
    """The server at an address, by what it says of itself.

    Raises EngineError when nothing answers, ConfigError for a server that cannot be published to.
    """
    models = client.get("/v1/models")
    listed = models.document if models.is_success else None
    entries = listed.get("data") if isinstance(listed, dict) else None
    owners = {str(each.get("owned_by", "")).lower() for each in entries or () if isinstance(each, dict)}
    for owner, advice in _REFUSED.items():
        if owner in owners:
            raise ConfigError(f"{client.url}: {advice}")
    if "vllm" in owners:
        return VLLM(client, _version(client, "/version"))
    information = next((path for path in ("/server_info", "/get_server_info") if _is_object(client.get(path))), None)
    if "sglang" in owners or information is not None:
        return SGLang(client, _version(client, information or "/server_info"))
    for path, word, advice in _PROBES:
        answer = client.get(path)
        if answer.is_success and word in answer.text.lower():
            raise ConfigError(f"{client.url}: {advice}")
    raise ConfigError(
        f"{client.url}: no server that can be published to answers there (/v1/models: {models.quoted}); expected vLLM, "
        "SGLang or a server with SGLang's calls"
    )


_LLAMA_CPP = "llama.cpp reads adapters and weights when it starts; convert a merged model to GGUF and start it anew"
_OLLAMA = "ollama makes models from GGUF files: merge the adapter, convert the result to GGUF, and `ollama create`"
_TGI = "TGI reads adapters when it starts (LORA_ADAPTERS=name=path); start it anew, or serve with vLLM or SGLang"
_REFUSED = {  # "owned_by" in its list of models: the advice
    "llamacpp": _LLAMA_CPP,
    "library": _OLLAMA,
    "lmdeploy": "LMDeploy takes weights as serialised tensors only, from its own machine; serve with vLLM or SGLang",
    "tensorrt_llm": "TensorRT-LLM takes no new weights over HTTP; adapters are named per request; start it anew",
}
_PROBES = (("/api/version", "version", _OLLAMA), ("/info", "model_id", _TGI), ("/props", "chat_template", _LLAMA_CPP))


def _is_object(answer: Answer) -> bool:
    return answer.is_success and isinstance(answer.document, dict)


def _version(client: Client, path: str) -> str:
    found = client.get(path).document
    return str(found.get("version", "unknown")) if isinstance(found, dict) else "unknown"


def probe(server: Server, model: str) -> list[list[float]]:
    """The highest log probabilities of the first token after each of PROBE_PROMPTS, largest first."""
    found = []
    for prompt in PROBE_PROMPTS:
        body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": _TOP}
        answer = server.client.expect(server.client.post("/v1/completions", body), f"a completion by {model!r}")
        try:
            top = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
            found.append(sorted(map(float, top.values()), reverse=True)[:_TOP])
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise EngineError(
                f"{server.client.url}: a completion by {model!r} has no log probabilities: {answer.quoted}"
            ) from None
    return found


def _listed_models(client: Client) -> list[dict[str, Any]]:
    found = client.expect(client.get("/v1/models"), "its list of models").document
    data = found.get("data") if isinstance(found, dict) else None
    models = [each for each in data or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
    if not models:
        raise EngineError(f"{client.url}: lists no model; is it still starting?")
    return models


@dataclass(frozen=True)
class VLLM:
    """A server of vLLM."""

    client: Client
    version: str
    engine: str = field(default="vLLM", init=False)

    def served(self) -> Served:
        models = _listed_models(self.client)
        adapters = {each["id"]: each.get("root") for each in models if each.get("parent")}
        base = next((each for each in models if not each.get("parent")), models[0])
        return Served(base["id"], base.get("root"), adapters)

    def load_adapter(self, name: str, path: str) -> None:
        # "load_inplace" reads the disk again at each step, and a name that is used again answers from the old cache
        self._post("/v1/load_lora_adapter", f"adapter {name!r} from {path}", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        answer = self.client.post("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status != 404:
            self.client.expect(answer, f"unloading adapter {name!r}")

    def weight_version(self) -> str | None:
        answer = self.client.get("/weight_info")
        version = answer.document.get("weight_version") if _is_object(answer) else None
        return None if version is None else str(version)

    def set_weight_version(self, version: str) -> None:
        self._post("/update_weight_version", "its version", {"new_version": version})

    def pause(self, in_flight: str) -> None:
        self.client.expect(self.client.post("/pause", mode=in_flight), "pausing")

    def resume(self) -> None:
        self._post("/resume", "resuming")

    def load_weights(self, path: str) -> None:
        arguments = {"weights_path": path, "is_checkpoint_format": True}
        self._post("/collective_rpc", f"weights from {path}", {"method": "reload_weights", "kwargs": arguments})
        self._post("/reset_prefix_cache", "dropping its prefix cache")
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):  # of models with images; others answer 404
            answer = self.client.post(path)
            if answer.status not in (400, 404, 405, 501):
                self.client.expect(answer, f"dropping its caches ({path})")

    def digests(self) -> Mapping[str, str] | None:
        answer = self.client.post("/weight_checker", {"action": "checksum"})
        found = answer.document.get("checksums") if _is_object(answer) else None
        return dict(found) if isinstance(found, dict) and found else None

    def _post(self, path: str, action: str, body: Mapping[str, Any] | None = None) -> Answer:
        answer = self.client.post(path, body)
        if answer.status == 404 and answer.document in (None, {"detail": "Not Found"}):
            raise EngineError(
                f"{self.client.url}: {action}: it has no {path}; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for adapters, with VLLM_SERVER_DEV_MODE=1 for weights"
            )
        return self.client.expect(answer, action)


_SGLANG_MODES = {"wait": "retract", "keep": "in_place", "abort": "abort"}


@dataclass(frozen=True)
class SGLang:
    """A server of SGLang, or one that has its calls."""

    client: Client
    version: str
    engine: str = field(default="SGLang", init=False)

    def served(self) -> Served:
        models = _listed_models(self.client)
        adapters = {each["id"]: each.get("root") for each in models if each.get("parent")}
        base = next((each for each in models if not each.get("parent")), models[0])
        return Served(base["id"], base.get("root"), adapters)

    def load_adapter(self, name: str, path: str) -> None:
        self._post("/load_lora_adapter", f"adapter {name!r} from {path}", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        if name in self.served().adapters:
            self._post("/unload_lora_adapter", f"unloading adapter {name!r}", {"lora_name": name})

    def weight_version(self) -> str | None:
        for path in ("/get_weight_version", "/model_info", "/get_model_info"):
            answer = self.client.get(path)
            version = answer.document.get("weight_version") if _is_object(answer) else None
            if version is not None:
                return str(version)
        return None

    def set_weight_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._post("/update_weight_version", "its version", body)

    def pause(self, in_flight: str) -> None:
        self._post("/pause_generation", "pausing", {"mode": _SGLANG_MODES[in_flight]})

    def resume(self) -> None:
        self._post("/continue_generation", "resuming")

    def load_weights(self, path: str) -> None:
        body = {"model_path": path, "flush_cache": True, "abort_all_requests": False, "keep_pause": True}
        self._post("/update_weights_from_disk", f"weights from {path}", body)

    def digests(self) -> Mapping[str, str] | None:
        answer = self.client.post("/weights_checker", {"action": "checksum"})
        found = dict(_digests_in(answer.document)) if _is_object(answer) else {}
        return found or None

    def _post(self, path: str, action: str, body: Mapping[str, Any] | None = None) -> Answer:
        answer = self.client.expect(self.client.post(path, body), action)
        found = answer.document
        if isinstance(found, dict) and found.get("success") is False:
            raise EngineError(f"{self.client.url}: {action}: refused: {answer.quoted}")
        return answer


def _digests_in(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The SHA-256 sums by name at any depth: each rank answers with an object of its own."""
    if isinstance(value, list):
        for rank, each in enumerate(value):
            yield from _digests_in(each, f"tp{rank}:")
    elif isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, str) and len(each) == 64 and set(each.lower()) <= set("0123456789abcdef"):
                yield f"{prefix}{name}", each.lower()
            else:
                yield from _digests_in(each, prefix)
