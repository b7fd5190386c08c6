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
_PACKED = tuple(
    f"{layer}{middle}"
    for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    for middle in ("", ".base_layer")
)
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Loaded:
    """A loaded adapter."""

    path: str
    digest: str


@dataclass(frozen=True)
class State:
    """What a server holds."""

    weights: str  # the folder that they came from
    version: str
    adapters: dict[str, Loaded]


@dataclass
class Engine(FakeServer):
    """The state of a server, and how it misbehaves.

    `traits`: "stale names" (an adapter loaded under a used name answers as its first), "cached
    weights" (a reload keeps the old ones), "half update" (a reload fails in the middle), "silent
    half" (it stops there without an error), "ignores adapters" (answers of the base), "own head" (a
    tied head is separate, as in a pipeline), "old head" (a reload keeps the head), "wrong digests",
    "no digests", "fewer digests" (none of the fourth layer), "no digests while paused", "unlisted"
    (a loaded adapter is not listed), "redirects" (to `elsewhere`), "no dev mode", "sha256" (SGLang:
    the digests of versions that use SHA-256), "packed" (linear layers are kept in another layout,
    and so are their digests), "packed once" (this layout is not made again when weights are
    replaced), "packed away" (the digests of linear layers are those of no bytes), "once" (traits of
    a reload end with the first one).
    """

    base: Path
    kind: str = "vllm"
    ranks: int = 1
    dtype: torch.dtype | None = None  # compute dtype; None: that of the files
    pads: bool = False  # the vocabulary to a multiple of PADDING
    lora: bool = True
    most_rank: int = 16
    delay_seconds: float = 0.0
    traits: set[str] = field(default_factory=set)
    elsewhere: str = ""
    weight_version: str = "default"
    adapters: dict[str, Loaded] = field(default_factory=dict)
    shards: dict[str, Tensor] = field(default_factory=dict)
    first_digests: dict[str, str] = field(default_factory=dict)
    # digests of layers in the layout that was made first
    packed: dict[str, str] = field(default_factory=dict)
    held: str = ""  # the folder that the weights came from; "" after half an update
    summed: tuple[tuple[int, ...], str] | None = None
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
        self.shards, self.held = self._read(str(self.base)), str(self.base)
        self.adapters, self.weight_version = {}, "default"
        self.running.set()

    def state(self) -> State:
        """What it holds now."""
        return State(self.held, self.weight_version, dict(self.adapters))

    def put_back(self, state: State) -> None:
        """Hold that again, with no faults, and forget the requests."""
        self.faults.clear()
        self.requests.clear()
        self.shards, self.held = self._read(state.weights), state.weights
        self.weight_version, self.adapters = state.version, dict(state.adapters)
        self.running.set()

    @property
    def is_paused(self) -> bool:
        return not self.running.is_set()

    def fail(self, matches: str = "", status: int = 0, **more: Any) -> Fault:
        """Make a request fail, and no other any more."""
        self.faults[:] = [Fault(matches, status, **more)]
        return self.faults[0]

    def requests_to(self, path: str) -> list[Request]:
        """The received requests to `path`."""
        return [request for request in self.requests if request.path == path]

    def arrive(self, request: Request) -> None:
        """Let a test hold the request up."""
        self.gate(request)

    def refusal(self, fault: Fault) -> Answer:
        """The engine's own error."""
        return Answer(fault.status, _error_text(self.kind, fault.status))

    @property
    def changes(self) -> list[str]:
        """The paths of the requests that may change something."""
        harmless = {"/v1/completions", "/weight_checker", "/weights_checker"}
        return [
            each.path
            for each in self.requests
            if each.method == "POST" and each.path not in harmless
        ]

    def checksums(self) -> dict[str, str]:
        """SHA-256 by rank and name."""
        return {name: _sha256(tensor) for name, tensor in self.shards.items()}

    def sums_of(self, path: str) -> dict[str, str]:
        """The checksums after `path` was loaded."""
        return {name: _sha256(tensor) for name, tensor in self._read(path).items()}

    def _digest_of_weights(self) -> str:
        """Digests of all parameters, computed again after one was replaced."""
        key = tuple(map(id, self.shards.values()))
        if self.summed is None or self.summed[0] != key:
            self.summed = (key, "".join(self.checksums().values()))
        return self.summed[1]

    # Files

    def _read(self, path: str) -> dict[str, Tensor]:
        """The parameters of all ranks, by "tp0:" and name."""
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            raise _Refusal(500, f"Cannot find any model weights with `{path}`")
        stored: dict[str, Tensor] = {}
        for file in files:
            stored |= load_file(file)
        config = json.loads((Path(path) / "config.json").read_text())
        if self.dtype is not None:
            stored = {name: tensor.to(self.dtype) for name, tensor in stored.items()}
        ranks = range(self.ranks)
        return {
            f"tp{rank}:{name}": each
            for rank in ranks
            for name, each in _shard(self, stored, config, rank)
        }

    def load_weights(self, path: str) -> None:
        """Load in place, tensor by tensor, as `reload_weights` does."""
        if "cached weights" in self.traits:
            return
        new = self._read(path)
        names = [name for name in new if not ("old head" in self.traits and "lm_head" in name)]
        if {"half update", "silent half"} & self.traits:
            names = names[: len(names) // 2]
        self.shards.update({name: new[name] for name in names})
        self.held = path if len(names) == len(new) else ""
        fails = "half update" in self.traits
        if "once" in self.traits:
            self.traits -= {"half update", "silent half", "old head", "once"}
        if fails:
            raise _Refusal(500, "CUDA out of memory. Tried to allocate 2.00 GiB")

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter."""
        if name in self.adapters:
            advice = "If you want to load the adapter in place, set 'load_inplace' to True."
            raise _Refusal(
                400,
                f"The lora adapter '{name}' has already been loaded. {advice}",
                "InvalidUserInput",
            )
        try:
            settings = json.loads((Path(path) / "adapter_config.json").read_text())
            tensors = load_file(Path(path) / "adapter_model.safetensors")
        except OSError:
            raise _Refusal(
                404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError"
            ) from None
        if settings["r"] > self.most_rank:
            raise _Refusal(
                500,
                f"Call to add_lora method failed: LoRA rank {settings['r']} is greater than "
                f"max_lora_rank {self.most_rank}.",
            )
        known = {
            key: each
            for key, each in tensors.items()
            if any(f".{layer}." in key for layer in _LAYERS)
        }
        moving = any(bool(each.any()) for key, each in known.items() if "lora_B" in key)
        digest = hashlib.sha256(
            b"".join(_sha256(known[key]).encode() for key in sorted(known))
        ).hexdigest()
        self.adapters[name] = Loaded(path, digest if moving else "")
        self.first_digests.setdefault(name, self.adapters[name].digest)

    def log_probabilities(self, adapter: str | None, prompt: Any) -> list[float]:
        """Five numbers, largest first, derived from the weights, the adapter and the prompt."""
        weights = self._digest_of_weights()
        applied = ""
        if adapter is not None and "ignores adapters" not in self.traits:
            applied = self.adapters[adapter].digest
            if "stale names" in self.traits:
                applied = self.first_digests[adapter]
        found = hashlib.sha256(f"{weights} {applied} {prompt}".encode()).digest()
        return sorted((-1 - byte / 64 for byte in found[:5]), reverse=True)


def _shard(
    engine: Engine, stored: dict[str, Tensor], config: dict[str, Any], rank: int
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of one rank: fused and sharded."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    middle = ".base_layer." if engine.lora else "."
    if "own head" in engine.traits:
        stored = {"lm_head.weight": stored["model.embed_tokens.weight"], **stored}

    def cut(tensor: Tensor, dimension: int, parts: int = 0) -> Tensor:
        parts = parts or engine.ranks
        return tensor.tensor_split(parts, dimension)[rank * parts // engine.ranks]

    for name, tensor in stored.items():
        head, _, tail = name.rpartition(".")
        layer = head.rpartition(".")[2]
        if layer == "q_proj":
            around = head.removesuffix("q_proj")
            # fewer heads than ranks: several ranks have the same head
            keys = min(key_heads, engine.ranks)
            pieces = [
                cut(tensor, 0),
                *(cut(stored[f"{around}{each}_proj.{tail}"], 0, keys) for each in "kv"),
            ]
            yield f"{around}qkv_proj{middle}{tail}", torch.cat(pieces)
        elif layer == "gate_proj":
            around = head.removesuffix("gate_proj")
            yield (
                f"{around}gate_up_proj{middle}{tail}",
                torch.cat(
                    [cut(stored[f"{around}{each}_proj.{tail}"], 0) for each in ("gate", "up")]
                ),
            )
        elif layer in ("o_proj", "down_proj") and tail == "weight":
            yield f"{head}{middle}{tail}", cut(tensor, 1)
        elif layer in ("embed_tokens", "lm_head"):
            more = -len(tensor) % PADDING if engine.pads else 0
            whole = torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])
            yield f"{head}{middle if layer == 'embed_tokens' else '.'}{tail}", cut(whole, 0)
        elif layer not in ("k_proj", "v_proj", "up_proj"):
            yield name, tensor


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


class _Refusal(Exception):  # noqa: N818 - how an action ends early
    def __init__(self, status: int, message: str, kind: str = "InternalServerError") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


@contextmanager
def serving(base: Path, kind: str = "vllm", **settings: Any) -> Iterator[Engine]:
    """A server with the model in `base`, see Engine."""
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
            return Answer(307, {}, {"Location": engine.elsewhere + self.path})
        engine.over.wait(engine.delay_seconds)
        return Answer(*self._result(engine, request))

    def _result(self, engine: Engine, request: Request) -> tuple[int, Any]:
        if request.path == "/v1/completions":  # without the lock: it may have to wait
            return self._guarded(_completion, engine, request)
        with engine.lock:
            action = _ROUTES[engine.kind].get((request.method, request.path))
            if action is None or (
                "no dev mode" in engine.traits and not request.path.startswith(("/v1", "/version"))
            ):
                return 404, {"detail": "Not Found"}
            return self._guarded(action, engine, request)

    def _guarded(
        self, action: Callable[[Engine, Request], Any], engine: Engine, request: Request
    ) -> tuple[int, Any]:
        try:
            return 200, action(engine, request)
        except _Refusal as refusal:
            if engine.kind == "sglang":
                return 400, {
                    "success": False,
                    "message": refusal.message,
                    "error_message": refusal.message,
                }
            error = {
                "message": refusal.message,
                "type": refusal.kind,
                "param": None,
                "code": refusal.status,
            }
            return refusal.status, {"error": error}
        except KeyError as error:
            return 400, {
                "error": {
                    "message": f"1 validation error: missing {error}",
                    "type": "Bad Request",
                    "code": 400,
                }
            }


def _error_text(kind: str, status: int) -> dict[str, Any]:
    """The engine's own error body."""
    if status == 404:
        return {"detail": "Not Found"}
    if kind == "sglang":
        return {
            "success": False,
            "message": {400: "Failed to update weights", 409: "The server is busy"}.get(
                status, "Internal Server Error"
            ),
        }
    message = {
        400: (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.action', 'msg': 'Field "
            "required'}"
        ),
        409: "Cannot compute checksums while the engine is paused",
    }.get(status, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
    kinds = {400: "Bad Request", 409: "Conflict"}
    return {
        "error": {
            "message": message,
            "type": kinds.get(status, "InternalServerError"),
            "code": status,
        }
    }


# Requests of both engines


def _models(engine: Engine, _: Request) -> Any:
    owner = {"object": "model", "created": int(time.time()), "owned_by": engine.kind}
    found = [
        {"id": "base", "root": str(engine.base), "parent": None, "max_model_len": 256, **owner}
    ]
    if "unlisted" not in engine.traits:
        found += [
            {"id": name, "root": each.path, "parent": "base", **owner}
            for name, each in engine.adapters.items()
        ]
    return {"object": "list", "data": found}


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
            raise _Refusal(
                404, f"The model `{model}` does not exist. Valid aliases: base.", "NotFoundError"
            )
        if adapter is not None and adapter not in engine.adapters:
            raise _Refusal(400, f"The following requested LoRA adapters are not loaded: {adapter}")
        found = engine.log_probabilities(adapter, request.body["prompt"])
    logprobs = {
        "tokens": ["t0"],
        "token_logprobs": [found[0]],
        "top_logprobs": [{f"t{place}": each for place, each in enumerate(found)}],
    }
    choice = {"index": 0, "text": "t0", "logprobs": logprobs, "finish_reason": "length"}
    return {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice]}


def _set_version(engine: Engine, request: Request) -> Any:
    engine.weight_version = request.body["new_version"]
    return {"success": True, "new_version": engine.weight_version}


def _pause(engine: Engine, request: Request) -> Any:
    mode = request.query.get("mode", "abort") if engine.kind == "vllm" else request.body["mode"]
    if (
        mode
        not in {"vllm": ("wait", "keep", "abort"), "sglang": ("abort", "retract", "in_place")}[
            engine.kind
        ]
    ):
        raise _Refusal(
            400,
            "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode'}",
            "Bad Request",
        )
    engine.running.clear()
    return {"status": "paused"}


def _resume(engine: Engine, _: Request) -> Any:
    engine.running.set()
    return {"status": "resumed"}


def _sums(engine: Engine) -> dict[str, str]:
    if "no digests while paused" in engine.traits and engine.is_paused:
        raise _Refusal(409, "Cannot compute checksums while the engine is paused", "Conflict")
    found = engine.checksums()
    if "fewer digests" in engine.traits:
        found = {name: digest for name, digest in found.items() if ".layers.3." not in name}
    if {"packed", "packed once", "packed away"} & engine.traits:
        linear = [
            name for name in found if name.endswith(tuple(f"{layer}.weight" for layer in _PACKED))
        ]
        for name in linear:
            values = (
                engine.packed.setdefault(name, found[name])
                if "packed once" in engine.traits
                else found[name]
            )
            found[name] = hashlib.sha256(
                b"" if "packed away" in engine.traits else values.encode()
            ).hexdigest()
    if "wrong digests" in engine.traits:
        found = {
            name: hashlib.sha256(digest.encode()).hexdigest() for name, digest in found.items()
        }
    return found


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
    engine.first_digests = {name: each.digest for name, each in engine.adapters.items()}
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
    return {"checksums": {f"dp0:pp0:pcp0:{name}": digest for name, digest in _sums(engine).items()}}


# SGLang's


def _done(message: str = "Success.") -> dict[str, Any]:
    return {"success": True, "message": message}


def _sglang_load(engine: Engine, request: Request) -> Any:
    engine.load_adapter(request.body["lora_name"], request.body["lora_path"])
    loaded = {name: each.path for name, each in engine.adapters.items()}
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
        mine = {
            name.partition(":")[2]: each
            for name, each in _sums(engine).items()
            if name.startswith(f"tp{rank}:")
        }
        if "sha256" not in engine.traits:  # 64 bits of another hash
            mine = {
                name: hashlib.md5(each.encode()).hexdigest()[:16] for name, each in mine.items()
            }
        whole = hashlib.sha256("".join(mine.values()).encode()).hexdigest()
        place = {
            "tp_rank": rank,
            "tp_size": engine.ranks,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
        }
        ranks.append({"checksums": mine, "per_gpu_checksum": whole, "parallelism_info": place})
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
