"""Compares the non-tensor contents that affect the output of a checkpoint: configs, code, extra
state, token ids.

Every field of a config is compared unless it is listed here as harmless, including fields that
libraries add later.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.messages import without_secrets
from ft_ckpt.storage import Store, files_made_by, read_text

EXTRA_FILE = "extra_state.json"  # non-tensor values of state dicts
# a plain module has none
SETTINGS_FILES = {"model": "config.json", "adapter": "adapter_config.json"}

# Fields of a model's config that do not change the output in eval mode; fields of dropout are
# harmless as well.
HARMLESS_MODEL_FIELDS = frozenset(
    {
        # origin of the config
        *("_name_or_path", "_commit_hash", "transformers_version", "_diffusers_version"),
        *("dtype", "torch_dtype"),  # dtype to load in; the dtypes of the tensors are compared
        # additional outputs
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        # choice of kernels
        *("_attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
        # training only, or weights that are not loaded
        *("gradient_checkpointing", "requires_grad", "initializer_range"),
    }
)
# Fields of an adapter's config that do not change the output in eval mode.
HARMLESS_ADAPTER_FIELDS = frozenset(
    {
        # the base is compared separately, by samples if possible
        *("base_model_name_or_path", "revision"),
        # version of the writer; class of the base, for AutoPeftModel
        *("peft_version", "auto_mapping"),
        "inference_mode",  # freezes the parameters at load
        # class of the wrapper; compared for prompt methods only, whose prompts the wrapper adds
        "task_type",
        # source of the initial values
        *("tokenizer_name_or_path", "prompt_tuning_init_state_dict_path"),
        "eva_config",  # source of the initial values; EVA does not change the base
    }
)
_DROPOUTS = ("dropout", "_pdrop", "layerdrop", "drop_path_rate")
# PEFT tests membership only, and writes some of them as sets, in any order
_UNORDERED = frozenset(
    {
        *(
            "target_modules",
            "exclude_modules",
            "feedforward_modules",
            "modules_to_save",
            "layers_to_transform",
        ),
    }
)
# values by layer pattern; PEFT takes the first match
PATTERNS = frozenset({"rank_pattern", "alpha_pattern"})
# Fields of AdaLoRA that determine the ranks during training; the ranks and scores are in the state
# of a run.
_ADALORA_FIELDS = (
    "rank_pattern",
    "target_r",
    "tinit",
    "tfinal",
    "deltaT",
    "beta1",
    "beta2",
    "total_step",
)
_ABSENT = object()
_MOST_LAYERS = 1 << 16  # upper bound of any count in a config
_COUNT = re.compile(r"\w*(layer|block|depth|stage|expert|head)s?")

Difference = tuple[str, str, str]  # field, value in the first, value in the other


def differing_settings(first: Store, other: Store, kind: str) -> list[Difference]:
    """The settings that differ between the folders of two parts and change the output, with values
    as text.

    `kind` of the parts: "model", "adapter" or "module". The bases of adapters are not compared.

    Raises CorruptError for a settings file that cannot be parsed.
    """
    in_files = [*_differing_files(first, other), *_differing_tokens(first, other)]
    if kind not in SETTINGS_FILES:
        return in_files
    name = SETTINGS_FILES[kind]
    one, two = (_settings_in(store, name) for store in (first, other))
    differing = [] if one == two else [(name, _presence(one), _presence(two))]
    if differing and one is not None and two is not None:
        with damaged_input(f"{first.where(name)} and {other.where(name)}"):
            differing = differences_between(one, two, kind)
    return [*differing, *in_files]


def quantisation_of(store: Store) -> str | None:
    """The field of config.json that describes a quantisation; None if there is none."""
    settings = _settings_in(store, "config.json") or {}
    return next(
        (name for name in ("quantization_config", "compression_config") if settings.get(name)), None
    )


def adapter_settings(store: Store) -> dict[str, Any]:
    """The contents of adapter_config.json.

    Raises MissingError if there is none, CorruptError if it is no object.
    """
    name = SETTINGS_FILES["adapter"]
    return _settings_in(store, name, read_text(store, name)) or {}


def differences_of_live(stored: Mapping[str, Any], config: Any) -> list[Difference]:
    """The fields in which the PEFT config of a live adapter differs from its `stored` settings,
    with values as text.

    Only fields that change the output if the tensors of the adapter and of its base are equal.
    Compared is what the config writes: a subclass may keep fields in a file of its own.
    """
    written = files_made_by(lambda folder: config.save_pretrained(str(folder)))
    live = json.loads(written[SETTINGS_FILES["adapter"]])
    in_tensors = {
        "init_lora_weights",
        *(_ADALORA_FIELDS if stored.get("peft_type") == "ADALORA" else ()),
    }
    known = {name: stored[name] for name in in_tensors & stored.keys()}
    return differences_between(stored, {**live, **known}, "adapter")


def is_irreproducible(settings: Mapping[str, Any]) -> bool:
    """Whether the initialisation of an adapter with these settings changes its base and cannot be
    repeated.
    """
    # here, because it imports torch.distributed
    from ft_ckpt.model.base_model import irreproducible

    return bool(irreproducible({"": SimpleNamespace(**settings)}))


def absurd_counts(config: Mapping[str, Any]) -> list[str]:
    """Counts in a config that are too large for any model, as text."""
    return [f"{name}: {value:,}" for name, value in _counts_in(config) if value > _MOST_LAYERS]


def _counts_in(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The counts in a config whose names match _COUNT, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _counts_in(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _counts_in(inner, name)
    elif isinstance(value, (int, float)) and _COUNT.fullmatch(name):
        yield name, int(value) if abs(value) < 1e300 else 10**300


def _text_of(store: Store, name: str) -> str | None:
    return read_text(store, name) if store.stat(name) is not None else None


def _settings_in(store: Store, name: str, text: str | None = None) -> dict[str, Any] | None:
    text = _text_of(store, name) if text is None else text
    with damaged_input(store.where(name)):
        settings = None if text is None else json.loads(text)
    if settings is not None and not isinstance(settings, dict):
        raise CorruptError(f"{store.where(name)}: not a JSON object of settings; use another copy")
    return settings


def _presence(content: object) -> str:
    return "absent" if content is None else "there"


def differences_between(
    one: Mapping[str, Any], two: Mapping[str, Any], kind: str
) -> list[Difference]:
    """The fields that differ between two configs of `kind` and change the output, with values as
    text.
    """
    if kind == "adapter":
        return _differing_leaves(
            _completed_adapter(one), _completed_adapter(two), partial(_counts_for_adapter, one)
        )
    found = _differing_leaves(one, two, _counts_for_model)
    if found and kind == "model":  # two versions of transformers may have written equal configs
        first, other = _canonical_config(one), _canonical_config(two)
        return (
            found
            if first is None or other is None
            else _differing_leaves(first, other, _counts_for_model)
        )
    return found


def _differing_leaves(one: Any, two: Any, counts: Callable[[str], bool]) -> list[Difference]:
    first, other = dict(_leaves(one)), dict(_leaves(two))
    names = [name for name in dict.fromkeys((*first, *other)) if counts(name)]
    pairs = [(name, first.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names]
    return [
        (name, _short_text(before), _short_text(after))
        for name, before, after in pairs
        if before != after
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each leaf in nested dicts and lists."""
    children = (
        value
        if isinstance(value, dict)
        else dict(enumerate(value))
        if isinstance(value, list)
        else {}
    )
    if not children:
        yield name, value
    for key, child in children.items():
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def _short_text(value: Any) -> str:
    # secrets are removed before truncation
    text = "absent" if value is _ABSENT else without_secrets(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _counts_for_model(name: str) -> bool:
    field = name.rpartition(".")[2]
    return field not in HARMLESS_MODEL_FIELDS and not any(word in field for word in _DROPOUTS)


def _counts_for_adapter(settings: Mapping[str, Any], name: str) -> bool:
    field = name.partition(".")[0]
    if field == "task_type":
        return "num_virtual_tokens" in settings
    return field not in HARMLESS_ADAPTER_FIELDS and "dropout" not in field


def order_counts(pattern: Iterable[str]) -> bool:
    """Whether the order of the keys of a rank_pattern or alpha_pattern may decide: PEFT takes the
    first match.
    """
    keys = list(pattern)
    if len(keys) > 1 and not all(re.fullmatch(r"[\w.]+", key) for key in keys):
        return True  # regular expressions may overlap
    plain = {*keys}
    return any(
        key[at + 1 :] in plain for key in keys for at, letter in enumerate(key) if letter == "."
    )


def _completed_adapter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with PEFT's defaults for absent fields, and one value for all initialisations
    that keep the base.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    from ft_ckpt.model.base_model import keeps_base

    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(settings.get("peft_type"))
    fields = dataclasses.fields(known) if known is not None else ()
    defaults = {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    }
    factories = {field.name: field.default_factory for field in fields}
    defaults |= {
        name: factory() for name, factory in factories.items() if factory is not dataclasses.MISSING
    }
    defaults.pop("runtime_config", None)  # never written
    completed = {**defaults, **settings}
    for name in _UNORDERED & completed.keys():
        completed[name] = (
            sorted(completed[name], key=str)
            if isinstance(completed[name], list)
            else completed[name]
        )
    for name in PATTERNS & completed.keys():
        if isinstance(completed[name], dict) and order_counts(completed[name]):
            completed[f"order of {name}"] = list(completed[name])
    if keeps_base(SimpleNamespace(**completed)):
        completed["init_lora_weights"] = "keeps the base"
    return completed


def _canonical_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config with the defaults and names of the installed transformers; None for a model it
    cannot parse.
    """
    import transformers

    kind = settings.get("model_type")
    if "auto_map" in settings or kind not in transformers.CONFIG_MAPPING or absurd_counts(settings):
        return None
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(settings)))
        return dict(config.to_dict())
    except Exception:  # noqa: BLE001 - anything that transformers raises for an invalid config
        return None


def _differing_files(first: Store, other: Store) -> list[Difference]:
    """Code and extra state files with different contents."""
    listed = {each.name for store in (first, other) for each in store.list_folder().objects}
    names = sorted(name for name in listed if name.endswith(".py") or name == EXTRA_FILE)
    pairs = [(name, _text_of(first, name), _text_of(other, name)) for name in names]
    return [
        (f"the text of {name}", _presence(a), "another" if a and b else _presence(b))
        for name, a, b in pairs
        if a != b
    ]


def _differing_tokens(first: Store, other: Store) -> list[Difference]:
    """Ids of different tokens, whose embedding rows must not be mixed.

    Ids in one tokenizer only are ignored.
    """
    name = "tokenizer.json"
    texts = [_text_of(store, name) for store in (first, other)]
    if texts[0] == texts[1]:
        return []
    one, two = (
        _tokens_in(store, name, text) for store, text in zip((first, other), texts, strict=True)
    )
    ids = sorted(number for number in one.keys() & two if one[number] != two[number])
    return [(f"token {number}", repr(one[number]), repr(two[number])) for number in ids]


def _tokens_in(store: Store, name: str, text: str | None) -> dict[int, str]:
    """The tokens of a tokenizer.json by id."""
    settings = _settings_in(store, name, text) or {}
    with damaged_input(store.where(name)):
        vocabulary = (settings.get("model") or {}).get("vocab") or {}
        # else a list of (token, score) in the order of the ids
        is_table = isinstance(vocabulary, dict)
        pairs = (
            vocabulary.items()
            if is_table
            else ((entry[0], at) for at, entry in enumerate(vocabulary))
        )
        tokens = {int(number): str(token) for token, number in pairs}
        return tokens | {
            int(each["id"]): str(each["content"]) for each in settings.get("added_tokens") or ()
        }
