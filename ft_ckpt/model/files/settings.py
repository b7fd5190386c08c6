"""Comparison of what affects the output beside tensors: configs, code, extra state, token ids.

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

from ft_ckpt.errors import damaged_input
from ft_ckpt.messages import without_secrets
from ft_ckpt.model.files.settings_files import (
    EXTRA_FILE,
    SETTINGS_FILES,
    absurd_counts,
    parse_settings,
    read_settings,
    text_of,
)
from ft_ckpt.model.tensors import irreproducible, keeps_base
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import files_made_by

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
        "target_modules",
        "exclude_modules",
        "feedforward_modules",
        "modules_to_save",
        "layers_to_transform",
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


Difference = tuple[str, str, str]  # field, value in the first, value in the second


def differing_settings(first: Store, second: Store, kind: str) -> list[Difference]:
    """List the settings that differ between the folders of two parts and change the output.

    Values are text. `kind` of the parts is "model", "adapter" or "module". The bases of adapters
    are not compared. Raises CorruptError for a settings file that cannot be parsed.
    """
    differences = []
    if kind in SETTINGS_FILES:
        differences += _differing_configs(first, second, kind)
    return [*differences, *_differing_files(first, second), *_differing_tokens(first, second)]


def _differing_configs(first: Store, second: Store, kind: str) -> list[Difference]:
    name = SETTINGS_FILES[kind]
    first_settings, second_settings = read_settings(first, name), read_settings(second, name)
    if first_settings == second_settings:
        return []
    if first_settings is None or second_settings is None:
        return [(name, _presence(first_settings), _presence(second_settings))]
    with damaged_input(f"{first.where(name)} and {second.where(name)}"):
        return differences_between(first_settings, second_settings, kind)


def _presence(content: object) -> str:
    return "absent" if content is None else "there"


def differences_of_live(stored: Mapping[str, Any], config: Any) -> list[Difference]:
    """List the fields in which the PEFT config of a live adapter differs from `stored` settings.

    Values are text. Only fields count that change the output if the tensors of the adapter and of
    its base are equal. The comparison takes what the config writes, because a subclass may keep
    fields in a file of its own.
    """
    written = files_made_by(lambda folder: config.save_pretrained(str(folder)))
    live = json.loads(written[SETTINGS_FILES["adapter"]])
    in_tensors = ["init_lora_weights"]
    if stored.get("peft_type") == "ADALORA":
        in_tensors += _ADALORA_FIELDS
    for name in in_tensors:
        if name in stored:
            live[name] = stored[name]
    return differences_between(stored, live, "adapter")


def is_irreproducible(settings: Mapping[str, Any]) -> bool:
    """Check whether the initialisation of an adapter changes its base and cannot be repeated."""
    return bool(irreproducible({"": SimpleNamespace(**settings)}))


def differences_between(
    first: Mapping[str, Any], second: Mapping[str, Any], kind: str
) -> list[Difference]:
    """List the fields that differ between two configs of `kind` and change the output, as text."""
    if kind == "adapter":
        counts = partial(_counts_for_adapter, first)
        return _differing_leaves(_completed_adapter(first), _completed_adapter(second), counts)
    differences = _differing_leaves(first, second, _counts_for_model)
    if not differences or kind != "model":
        return differences
    # two versions of transformers may have written equal configs
    first_config, second_config = _canonical_config(first), _canonical_config(second)
    if first_config is None or second_config is None:
        return differences
    return _differing_leaves(first_config, second_config, _counts_for_model)


def _differing_leaves(first: Any, second: Any, counts: Callable[[str], bool]) -> list[Difference]:
    first_leaves, second_leaves = dict(_leaves(first)), dict(_leaves(second))
    differences = []
    for name in dict.fromkeys((*first_leaves, *second_leaves)):
        before = first_leaves.get(name, _ABSENT)
        after = second_leaves.get(name, _ABSENT)
        if before != after and counts(name):
            differences.append((name, _short_text(before), _short_text(after)))
    return differences


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf in nested dicts and lists."""
    children: dict[Any, Any] = {}
    if isinstance(value, dict):
        children = value
    elif isinstance(value, list):
        children = dict(enumerate(value))
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
    """Check whether the order of a rank_pattern or alpha_pattern matters.

    PEFT takes the first match.
    """
    keys = list(pattern)
    if len(keys) > 1 and not all(re.fullmatch(r"[\w.]+", key) for key in keys):
        return True  # regular expressions may overlap
    return any(_has_suffix_among(key, set(keys)) for key in keys)


def _has_suffix_among(key: str, keys: set[str]) -> bool:
    """Check whether the last steps of a dotted key are a key themselves."""
    steps = key.split(".")
    return any(".".join(steps[index:]) in keys for index in range(1, len(steps)))


def _completed_adapter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add PEFT's defaults for absent fields to the settings.

    All initialisations that keep the base get the same value.
    """
    completed = {**_peft_defaults(settings.get("peft_type")), **settings}
    for name in _UNORDERED & completed.keys():
        if isinstance(completed[name], list):
            completed[name] = sorted(completed[name], key=str)
    for name in PATTERNS & completed.keys():
        if isinstance(completed[name], dict) and order_counts(completed[name]):
            completed[f"order of {name}"] = list(completed[name])
    if keeps_base(SimpleNamespace(**completed)):
        completed["init_lora_weights"] = "keeps the base"
    return completed


def _peft_defaults(method: Any) -> dict[str, Any]:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(method)
    if config_class is None:
        return {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    defaults.pop("runtime_config", None)  # never written
    return defaults


def _canonical_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config with the defaults and names of the installed transformers.

    Returns None for a model that transformers cannot parse.
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


def _differing_files(first: Store, second: Store) -> list[Difference]:
    """List code and extra state files with different contents."""
    names = set()
    for store in (first, second):
        for file in store.list_folder().objects:
            if file.name.endswith(".py") or file.name == EXTRA_FILE:
                names.add(file.name)
    differences = []
    for name in sorted(names):
        before, after = text_of(first, name), text_of(second, name)
        if before != after:
            presence = "another" if before and after else _presence(after)
            differences.append((f"the text of {name}", _presence(before), presence))
    return differences


def _differing_tokens(first: Store, second: Store) -> list[Difference]:
    """Return the differing tokens by id: their embedding rows must not be mixed.

    Ids in one tokenizer only are ignored.
    """
    name = "tokenizer.json"
    first_text, second_text = text_of(first, name), text_of(second, name)
    if first_text == second_text:
        return []
    first_tokens = _tokens_in(first, name, first_text)
    second_tokens = _tokens_in(second, name, second_text)
    differences = []
    for number in sorted(first_tokens.keys() & second_tokens.keys()):
        before, after = first_tokens[number], second_tokens[number]
        if before != after:
            differences.append((f"token {number}", repr(before), repr(after)))
    return differences


def _tokens_in(store: Store, name: str, text: str | None) -> dict[int, str]:
    """Read the tokens of a tokenizer.json by id."""
    settings = {} if text is None else parse_settings(store, name, text) or {}
    tokens = {}
    with damaged_input(store.where(name)):
        vocabulary = (settings.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            for token, number in vocabulary.items():
                tokens[int(number)] = str(token)
        else:  # (token, score) in the order of the ids
            for number, entry in enumerate(vocabulary):
                tokens[number] = str(entry[0])
        for added in settings.get("added_tokens") or ():
            tokens[int(added["id"])] = str(added["content"])
    return tokens
