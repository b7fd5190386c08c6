"""Servers on loopback that behave as vLLM and SGLang do, with faults.

Weights and adapters are read from the requested paths. Parameters are fused and sharded as in vLLM,
and their digests are real. Answers are derived from these digests, so that they change with the
weights and with the adapter.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import http_server
import torch
from http_server import Answer, FakeHandler, FakeServer, Fault, Request
from safetensors.torch import load_file
from torch import Tensor

PADDING = 64
_LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# the ends of the names of linear layers, with LoRA and without
_LINEAR_WEIGHTS = (
    *(f"{layer}.weight" for layer in _LINEAR),
    *(f"{layer}.base_layer.weight" for layer in _LINEAR),
)
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoadedAdapter:
    """A loaded adapter."""

    path: str
    digest: str  # of its tensors; "" if it changes nothing


@dataclass(frozen=True)
class State:
    """The weights, the version and the adapters of a server."""

    weights: str  # the folder that they came from
    version: str
    adapters: dict[str, LoadedAdapter]


@dataclass
class Engine(FakeServer):
    """The state of a server, and how it misbehaves.

    `traits`: "stale names" (an adapter loaded under a used name answers as its first), "cached
    weights" (a reload keeps the old ones), "half update" (a reload fails in the middle), "silent
    half" (it stops there without an error), "ignores adapters" (answers of the base), "own head" (a
    tied head is separate, as in a pipeline), "old head" (a reload keeps the head), "wrong digests",
    "no digests", "fewer digests" (none of the fourth layer), "no digests while paused", "unlisted"
    (a loaded adapter is not listed), "redirects" (to another server), "no dev mode", "sha256"
    (SGLang: digests of versions that use SHA-256), "packed" (linear layers are kept in another
    layout, and so are their digests), "packed once" (this layout is not made again when weights are
    replaced), "packed away" (the digests of linear layers are those of no bytes), "once" (traits of
    a reload end with the first one).
    """

    base: Path
    kind: str = "vllm"
    ranks: int = 1
    dtype: torch.dtype | None = None  # compute dtype; None: that of the files
    pads: bool = False  # the vocabulary to a multiple of PADDING
    lora: bool = True
    max_rank: int = 16
    delay_seconds: float = 0.0
    traits: set[str] = field(default_factory=set)
    redirect_url: str = ""
    weight_version: str = "default"
    adapters: dict[str, LoadedAdapter] = field(default_factory=dict)
    shards: dict[str, Tensor] = field(default_factory=dict)
    first_digests: dict[str, str] = field(default_factory=dict)
    # digests of layers in the layout that was made first
    packed: dict[str, str] = field(default_factory=dict)
    weights_path: str = ""  # the folder that the weights came from; "" after half an update
    # the ids of the tensors, and the digest of all of them
    known_digest: tuple[tuple[int, ...], str] | None = None
    patience_seconds: float = 30.0  # how long a completion waits for the end of a pause
    during_pause: list[str] = field(default_factory=list)  # completions requested while paused
    # called before a request is received; may block
    gate: Callable[[Request], Any] = lambda _: None

    def __post_init__(self) -> None:
        super().__init__()
        self.running = threading.Event()
        self.running.set()
        self.start()

    def start(self) -> None:
        """Reset to the state after a start: the first weights, no adapters."""
        self.shards, self.weights_path = self._read(str(self.base)), str(self.base)
        self.adapters, self.weight_version = {}, "default"
        self.running.set()

    def state(self) -> State:
        """Return what the server holds now."""
        return State(self.weights_path, self.weight_version, dict(self.adapters))

    def put_back(self, state: State) -> None:
        """Hold `state` again, without faults and without a log of requests."""
        self.faults.clear()
        self.requests.clear()
        self.shards, self.weights_path = self._read(state.weights), state.weights
        self.weight_version, self.adapters = state.version, dict(state.adapters)
        self.running.set()

    @property
    def is_paused(self) -> bool:
        return not self.running.is_set()

    def fail(self, matches: str = "", status: int = 0, **options: Any) -> Fault:
        """Replace all faults by this one."""
        self.faults[:] = [Fault(matches, status, **options)]
        return self.faults[0]

    def requests_to(self, path: str) -> list[Request]:
        """Return the received requests to `path`."""
        return [request for request in self.requests if request.path == path]

    def arrive(self, request: Request) -> None:
        """Let a test delay the request."""
        self.gate(request)

    def refusal(self, fault: Fault) -> Answer:
        """Return the engine's own error."""
        return Answer(fault.status, _error_text(self.kind, fault.status))

    @property
    def changes(self) -> list[str]:
        """The paths of the requests that may change something."""
        harmless = {"/v1/completions", "/weight_checker", "/weights_checker"}
        posted = [request.path for request in self.requests if request.method == "POST"]
        return [path for path in posted if path not in harmless]

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter by rank and name."""
        return {name: _sha256(tensor) for name, tensor in self.shards.items()}

    def sums_of(self, path: str) -> dict[str, str]:
        """Return the checksums after `path` was loaded."""
        return {name: _sha256(tensor) for name, tensor in self._read(path).items()}

    def _digest_of_weights(self) -> str:
        """Return the digests of all parameters, computed again after one was replaced."""
        key = tuple(map(id, self.shards.values()))
        if self.known_digest is None or self.known_digest[0] != key:
            self.known_digest = (key, "".join(self.checksums().values()))
        return self.known_digest[1]

    # Files

    def _read(self, path: str) -> dict[str, Tensor]:
        """Read the parameters of all ranks, by "tp0:" and name."""
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise _Refusal(500, f"Cannot find any model weights with `{path}`")
        stored: dict[str, Tensor] = {}
        for file in files:
            stored |= load_file(file)
        config = json.loads((Path(path) / "config.json").read_text())
        if self.dtype is not None:
            stored = {name: tensor.to(self.dtype) for name, tensor in stored.items()}
        shards = {}
        for rank in range(self.ranks):
            for name, shard in _shard(self, stored, config, rank):
                shards[f"tp{rank}:{name}"] = shard
        return shards

    def load_weights(self, path: str) -> None:
        """Load in place, tensor by tensor, as `reload_weights` does."""
        if "cached weights" in self.traits:
            return
        new = self._read(path)
        names = [name for name in new if not ("old head" in self.traits and "lm_head" in name)]
        if {"half update", "silent half"} & self.traits:
            names = names[: len(names) // 2]
        self.shards.update({name: new[name] for name in names})
        self.weights_path = path if len(names) == len(new) else ""
        fails = "half update" in self.traits
        if "once" in self.traits:
            self.traits -= {"half update", "silent half", "old head", "once"}
        if fails:
            raise _Refusal(500, "CUDA out of memory. Tried to allocate 2.00 GiB")

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from the folder `path` under a name."""
        if name in self.adapters:
            advice = "If you want to load the adapter in place, set 'load_inplace' to True."
            message = f"The lora adapter '{name}' has already been loaded. {advice}"
            raise _Refusal(400, message, "InvalidUserInput")
        try:
            settings = json.loads((Path(path) / "adapter_config.json").read_text())
            tensors = load_file(Path(path) / "adapter_model.safetensors")
        except OSError:
            message = f"Loading lora {name} failed: No adapter found for {path}"
            raise _Refusal(404, message, "NotFoundError") from None
        if settings["r"] > self.max_rank:
            reason = f"LoRA rank {settings['r']} is greater than max_lora_rank {self.max_rank}."
            raise _Refusal(500, f"Call to add_lora method failed: {reason}")
        digests, changes_outputs = "", False
        for key in sorted(tensors):
            if any(f".{layer}." in key for layer in _LAYERS):
                digests += _sha256(tensors[key])
                changes_outputs |= "lora_B" in key and bool(tensors[key].any())
        digest = hashlib.sha256(digests.encode()).hexdigest()
        self.adapters[name] = LoadedAdapter(path, digest if changes_outputs else "")
        self.first_digests.setdefault(name, self.adapters[name].digest)

    def log_probabilities(self, adapter: str | None, prompt: Any) -> list[float]:
        """Derive five numbers, largest first, from the weights, the adapter and the prompt."""
        weights = self._digest_of_weights()
        applied = ""
        if adapter is not None and "ignores adapters" not in self.traits:
            applied = self.adapters[adapter].digest
            if "stale names" in self.traits:
                applied = self.first_digests[adapter]
        digest = hashlib.sha256(f"{weights} {applied} {prompt}".encode()).digest()
        return sorted((-1 - byte / 64 for byte in digest[:5]), reverse=True)


def _shard(
    engine: Engine, stored: dict[str, Tensor], config: dict[str, Any], rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of one rank: fused and sharded."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    middle = ".base_layer." if engine.lora else "."
    if "own head" in engine.traits:
        stored = {"lm_head.weight": stored["model.embed_tokens.weight"], **stored}

    def cut(tensor: Tensor, dimension: int, parts: int = 0) -> Tensor:
        parts = parts or engine.ranks
        return tensor.tensor_split(parts, dimension)[rank * parts // engine.ranks]

    for name, tensor in stored.items():
        path, _, kind = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        if layer == "q_proj":
            # fewer heads than ranks: several ranks have the same head
            parts = min(key_heads, engine.ranks)
            keys = cut(stored[f"{parent}.k_proj.{kind}"], 0, parts)
            values = cut(stored[f"{parent}.v_proj.{kind}"], 0, parts)
            yield f"{parent}.qkv_proj{middle}{kind}", torch.cat([cut(tensor, 0), keys, values])
        elif layer == "gate_proj":
            up = stored[f"{parent}.up_proj.{kind}"]
            yield f"{parent}.gate_up_proj{middle}{kind}", torch.cat([cut(tensor, 0), cut(up, 0)])
        elif layer in ("o_proj", "down_proj") and kind == "weight":
            yield f"{path}{middle}{kind}", cut(tensor, 1)
        elif layer in ("embed_tokens", "lm_head"):
            padding = -len(tensor) % PADDING if engine.pads else 0
            padded = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])
            yield f"{path}{middle if layer == 'embed_tokens' else '.'}{kind}", cut(padded, 0)
        elif layer not in ("k_proj", "v_proj", "up_proj"):
            yield name, tensor


def _sha256(tensor: Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


class _Refusal(Exception):  # noqa: N818 - how an action ends early
    def __init__(self, status: int, message: str, kind: str = "InternalServerError") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


@contextmanager
def serving(base: Path, kind: str = "vllm", **settings: Any) -> Iterator[Engine]:
    """Serve the model in `base` during the block; `settings` are fields of Engine."""
    engine = Engine(base, kind, **settings)
    with http_server.serving(engine, _Handler):
        try:
            yield engine
        finally:
            engine.over.set()
            engine.running.set()


class _Handler(FakeHandler):
    def answer(self, request: Request) -> Answer:
        engine: Engine = self.fake
        if "redirects" in engine.traits:
            return Answer(307, {}, {"Location": engine.redirect_url + self.path})
        engine.over.wait(engine.delay_seconds)
        return Answer(*self._result(engine, request))

    def _result(self, engine: Engine, request: Request) -> tuple[int, Any]:
        if request.path == "/v1/completions":  # without the lock: it may have to wait
            return self._guarded(_completion, engine, request)
        is_public = request.path.startswith(("/v1", "/version"))
        with engine.lock:
            action = _ROUTES[engine.kind].get((request.method, request.path))
            if action is None or ("no dev mode" in engine.traits and not is_public):
                return 404, {"detail": "Not Found"}
            return self._guarded(action, engine, request)

    def _guarded(
        self, action: Callable[[Engine, Request], Any], engine: Engine, request: Request
    ) -> tuple[int, Any]:
        try:
            return 200, action(engine, request)
        except _Refusal as refusal:
            text = refusal.message
            if engine.kind == "sglang":
                return 400, {"success": False, "message": text, "error_message": text}
            facts = {"message": text, "type": refusal.kind, "param": None, "code": refusal.status}
            return refusal.status, {"error": facts}
        except KeyError as error:
            text = f"1 validation error: missing {error}"
            return 400, {"error": {"message": text, "type": "Bad Request", "code": 400}}


def _error_text(kind: str, status: int) -> dict[str, Any]:
    """Return the body of an error as the engine writes it."""
    if status == 404:
        return {"detail": "Not Found"}
    if kind == "sglang":
        messages = {400: "Failed to update weights", 409: "The server is busy"}
        return {"success": False, "message": messages.get(status, "Internal Server Error")}
    message = {
        400: (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.action', 'msg': 'Field "
            "required'}"
        ),
        409: "Cannot compute checksums while the engine is paused",
    }.get(status, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
    kinds = {400: "Bad Request", 409: "Conflict"}
    error_kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": error_kind, "code": status}}


# Requests of both engines


def _models(engine: Engine, _: Request) -> Any:
    owner = {"object": "model", "created": int(time.time()), "owned_by": engine.kind}
    base = {"id": "base", "root": str(engine.base), "parent": None, "max_model_len": 256}
    models = [{**base, **owner}]
    if "unlisted" not in engine.traits:
        for name, adapter in engine.adapters.items():
            models.append({"id": name, "root": adapter.path, "parent": "base", **owner})
    return {"object": "list", "data": models}


def _completion(engine: Engine, request: Request) -> Any:
    model = request.body["model"]
    if engine.is_paused:
        engine.during_pause.append(model)
        engine.running.wait(engine.patience_seconds)
    with engine.lock:
        adapter = model if model in engine.adapters else None
        if engine.kind == "sglang":  # a name without the base's is taken for the base
            adapter = model.partition(":")[2] or None
        if model not in ("base", adapter) and engine.kind == "vllm":
            message = f"The model `{model}` does not exist. Valid aliases: base."
            raise _Refusal(404, message, "NotFoundError")
        if adapter is not None and adapter not in engine.adapters:
            raise _Refusal(400, f"The following requested LoRA adapters are not loaded: {adapter}")
        numbers = engine.log_probabilities(adapter, request.body["prompt"])
    top = {f"t{place}": number for place, number in enumerate(numbers)}
    logprobs = {"tokens": ["t0"], "token_logprobs": [numbers[0]], "top_logprobs": [top]}
    choice = {"index": 0, "text": "t0", "logprobs": logprobs, "finish_reason": "length"}
    return {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice]}


def _set_version(engine: Engine, request: Request) -> Any:
    engine.weight_version = request.body["new_version"]
    return {"success": True, "new_version": engine.weight_version}


def _pause(engine: Engine, request: Request) -> Any:
    if engine.kind == "vllm":
        mode, modes = request.query.get("mode", "abort"), ("wait", "keep", "abort")
    else:
        mode, modes = request.body["mode"], ("abort", "retract", "in_place")
    if mode not in modes:
        message = "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode'}"
        raise _Refusal(400, message, "Bad Request")
    engine.running.clear()
    return {"status": "paused"}


def _resume(engine: Engine, _: Request) -> Any:
    engine.running.set()
    return {"status": "resumed"}


def _sums(engine: Engine) -> dict[str, str]:
    """Return the digests that the server reports, by rank and name."""
    if "no digests while paused" in engine.traits and engine.is_paused:
        raise _Refusal(409, "Cannot compute checksums while the engine is paused", "Conflict")
    sums = engine.checksums()
    if "fewer digests" in engine.traits:
        sums = {name: digest for name, digest in sums.items() if ".layers.3." not in name}
    if {"packed", "packed once", "packed away"} & engine.traits:
        for name in sums:
            if name.endswith(_LINEAR_WEIGHTS):
                sums[name] = _packed_digest(engine, name, sums[name])
    if "wrong digests" in engine.traits:
        sums = {name: _digest_of(digest) for name, digest in sums.items()}
    return sums


def _packed_digest(engine: Engine, name: str, digest: str) -> str:
    """Return the digest of a linear layer that is kept in another layout."""
    if "packed away" in engine.traits:
        return _digest_of("")
    if "packed once" in engine.traits:
        digest = engine.packed.setdefault(name, digest)
    return _digest_of(digest)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# vLLM's


def _load_adapter(engine: Engine, request: Request) -> Any:
    if request.body.get("load_inplace"):
        raise AssertionError("load_inplace reads the disk at each step")
    name = request.body["lora_name"]
    engine.load_adapter(name, request.body["lora_path"])
    return f"Success: LoRA adapter '{name}' added successfully."


def _unload_adapter(engine: Engine, request: Request) -> Any:
    name = request.body["lora_name"]
    if engine.adapters.pop(name, None) is None:
        raise _Refusal(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    return f"Success: LoRA adapter '{name}' removed successfully."


def _reset_prefix_cache(engine: Engine, _: Request) -> Any:
    engine.first_digests = {name: adapter.digest for name, adapter in engine.adapters.items()}
    return {"success": True}


def _collective(engine: Engine, request: Request) -> Any:
    assert request.body["method"] == "reload_weights"
    assert request.body["kwargs"]["is_checkpoint_format"] is True
    engine.load_weights(request.body["kwargs"]["weights_path"])
    return {"results": [None] * engine.ranks}


def _weight_checker(engine: Engine, request: Request) -> Any:
    assert request.body == {"action": "checksum"}
    if "no digests" in engine.traits:
        raise _Refusal(404, "Not Found", "NotFoundError")
    sums = {f"dp0:pp0:pcp0:{name}": digest for name, digest in _sums(engine).items()}
    return {"checksums": sums}


# SGLang's


def _done(message: str = "Success.") -> dict[str, Any]:
    return {"success": True, "message": message}


def _sglang_load(engine: Engine, request: Request) -> Any:
    engine.load_adapter(request.body["lora_name"], request.body["lora_path"])
    loaded = {name: adapter.path for name, adapter in engine.adapters.items()}
    return {"success": True, "error_message": "", "loaded_adapters": loaded}


def _sglang_unload(engine: Engine, request: Request) -> Any:
    if engine.adapters.pop(request.body["lora_name"], None) is None:
        raise _Refusal(400, f"LoRA adapter with name {request.body['lora_name']} is not loaded.")
    return {"success": True, "error_message": ""}


def _from_disk(engine: Engine, request: Request) -> Any:
    engine.load_weights(request.body["model_path"])
    if not request.body.get("keep_pause"):
        engine.running.set()
    return {**_done("Succeeded to update model weights."), "num_paused_requests": 0}


def _weights_checker(engine: Engine, request: Request) -> Any:
    assert request.body == {"action": "checksum"}
    if "no digests" in engine.traits:
        raise _Refusal(400, "Unsupported action='checksum'")
    ranks = []
    for rank in range(engine.ranks):
        of_rank = {}
        for name, digest in _sums(engine).items():
            owner, _, parameter = name.partition(":")
            if owner == f"tp{rank}":
                if "sha256" not in engine.traits:  # 64 bits of another hash
                    digest = hashlib.md5(digest.encode()).hexdigest()[:16]
                of_rank[parameter] = digest
        place = {"tp_rank": rank, "tp_size": engine.ranks}
        place |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        whole = _digest_of("".join(of_rank.values()))
        ranks.append({"checksums": of_rank, "per_gpu_checksum": whole, "parallelism_info": place})
    return {**_done(), "ranks": ranks}


_BOTH: dict[tuple[str, str], Callable[[Engine, Request], Any]] = {
    ("GET", "/v1/models"): _models,
    ("POST", "/update_weight_version"): _set_version,
}
_ROUTES: dict[str, dict[tuple[str, str], Callable[[Engine, Request], Any]]] = {
    "vllm": {
        **_BOTH,
        ("GET", "/version"): lambda *_: {"version": "0.32.0"},
        ("POST", "/v1/load_lora_adapter"): _load_adapter,
        ("POST", "/v1/unload_lora_adapter"): _unload_adapter,
        ("POST", "/pause"): _pause,
        ("POST", "/resume"): _resume,
        ("GET", "/is_paused"): lambda engine, _: {"is_paused": engine.is_paused},
        ("POST", "/collective_rpc"): _collective,
        ("POST", "/weight_checker"): _weight_checker,
        ("GET", "/weight_info"): lambda engine, _: {"weight_version": engine.weight_version},
        ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
        ("POST", "/reset_mm_cache"): lambda *_: "",
        ("POST", "/reset_encoder_cache"): lambda *_: "",
    },
    "sglang": {
        **_BOTH,
        ("GET", "/server_info"): lambda *_: {"version": "0.5.9"},
        ("GET", "/model_info"): lambda engine, _: {"weight_version": engine.weight_version},
        ("POST", "/load_lora_adapter"): _sglang_load,
        ("POST", "/unload_lora_adapter"): _sglang_unload,
        ("POST", "/pause_generation"): _pause,
        ("POST", "/continue_generation"): _resume,
        ("POST", "/update_weights_from_disk"): _from_disk,
        ("POST", "/weights_checker"): _weights_checker,
    },
}
