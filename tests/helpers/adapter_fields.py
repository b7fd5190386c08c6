"""Change one setting of an adapter's config at a time: PEFT's outputs for the same folder, or one
of our errors.
"""

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES, make
from compare import logits
from methods import METHODS, UNMERGEABLE, with_adapter
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from small_checkpoints import edit
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors

LINEAR = ["q_proj", "v_proj", "down_proj"]
GONE = object()  # the setting is left out
VALUES: list[Any] = [
    *(
        GONE,
        None,
        True,
        False,
        0,
        -1,
        2,
        5,
        0.5,
        1e300,
        "x",
        "(",
        "",
        [],
        ["x"],
        [0],
        [3, 5],
        [[0, 1]],
    ),
    *({}, {"x": 1}, {"(": 2}, {"q_proj": 2}, ["q_proj"], ["lm_head"], "all-linear", ".*v_proj"),
]
SHARED = {
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
}
Numbers = Callable[[], Any]


class FieldTrials:
    """A trained adapter of `method` in PEFT's folder and in our checkpoint, and variants of its
    config.
    """

    def __init__(self, method: str, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.base, self.theirs, self.ours = (folder / name for name in ("base", "theirs", "ours"))
        made: Any = make(ARCHITECTURES["llama-tied"])
        made.save_pretrained(self.base)
        self.plain: Any = AutoModelForCausalLM.from_pretrained(self.base)
        self.method, self.shapes_of_base = method, {one.shape for one in self.plain.parameters()}
        self.model: Any = with_adapter(
            self.fresh_base(), {**METHODS, **UNMERGEABLE}[method](LINEAR)
        )
        self.model.save_pretrained(self.theirs)
        CheckpointSaver().save(self.model, self.ours, adapter_only=True)
        self.config = json.loads((self.theirs / "adapter_config.json").read_text())
        shutil.copytree(self.theirs, folder / "unchanged")
        self.unchanged = folder / "unchanged"

    def fresh_base(self) -> Any:
        return copy.deepcopy(self.plain)

    def all_changes(self) -> list[tuple[str, Any]]:
        """Each field with each value that differs from its own; fields shared by all methods only
        for LoRA.
        """
        fields = [name for name in self.config if name not in SHARED or self.method == "lora"]
        # draws numbers each time it computes
        fields = [name for name in fields if name != "sample_at_inference"]
        endless = [("shadow_num_hidden_layers", 1e300)]  # PEFT builds so many
        numbers = {
            name: [v + 1, v * 2] for name, v in self.config.items() if type(v) in (int, float)
        }
        return [
            (name, value)
            for name in fields
            for value in [*VALUES, *numbers.get(name, [])]
            if (type(value) is not type(self.config[name]) or value != self.config[name])
            and (name, value) not in endless
        ]

    def finds(self, field: str, value: Any) -> Iterator[str]:
        """Problems of merge, load_model, average, save and resume of the adapter with that
        change.
        """
        changed = {**self.config, field: value}
        if value is GONE:
            del changed[field]
        text = json.dumps(changed)
        (self.theirs / "adapter_config.json").write_text(text)
        edit(self.ours, "adapter_config.json", text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, wanted, found in self._pairs():
                if wrong := _compared(wanted, found):
                    yield (
                        f"{self.method}: {field}={'gone' if value is GONE else value!r}: "
                        f"{name}: {wrong}"
                    )

    def _pairs(self) -> Iterator[tuple[str, Numbers, Numbers]]:
        wanted = _once_more(lambda: logits(self._loaded_by_peft()))
        yield "merge", _once_more(self._merged_by_peft), self._merged
        yield (
            "load_model",
            wanted,
            lambda: logits(ft_ckpt.load_model(self.ours, base=self.fresh_base())),
        )
        try:
            live = self._loaded_by_peft()
            numbers = logits(live)
        except Exception:
            return
        # reads files only: a config that PEFT refuses stays refused
        yield "average", wanted, self._averaged
        yield "save", lambda: numbers, lambda: self._saved(live)
        yield "resume", lambda: numbers, lambda: self._resumed(live, live)
        # its outputs differ in inference mode, which `live` is in: the resume warns of that
        if self.method != "cpt":
            yield (
                "resume of the unchanged",
                lambda: logits(self.model),
                lambda: self._resumed(self.model, live),
            )

    def _loaded_by_peft(self) -> Any:
        return PeftModel.from_pretrained(self.fresh_base(), self.theirs)

    def _merged_by_peft(self) -> Any:
        live = self._loaded_by_peft()
        has_own_head = isinstance(live.get_base_model().get_output_embeddings(), BaseTunerLayer)
        # PEFT merges into the tied embeddings, too, and the outputs are others than before: ours
        # stores both
        return logits(live if has_own_head else live.merge_and_unload())

    def _merged(self) -> Any:
        ft_ckpt.merge(self.theirs, self._empty("out"), base=self.base, progress=False)
        return logits(AutoModelForCausalLM.from_pretrained(self.out))

    def _averaged(self) -> Any:
        ft_ckpt.average([self.unchanged, self.theirs], self._empty("out"), progress=False)
        return logits(PeftModel.from_pretrained(self.fresh_base(), self.out))

    def _saved(self, live: Any) -> Any:
        CheckpointSaver().save(live, self._empty("out"), adapter_only=True)
        return logits(ft_ckpt.load_model(self.out, base=self.fresh_base()))

    def _resumed(self, live: Any, other: Any) -> Any:
        """Outputs after resuming the state of `live` into a copy of `other` with changed adapter
        weights.
        """
        CheckpointSaver().save_state(live, self._empty("out"))
        again = copy.deepcopy(other)
        base = {
            id(one)
            for one in again.get_base_model().parameters()
            if one.shape in self.shapes_of_base
        }
        with torch.no_grad():
            for name, parameter in again.named_parameters():
                # AdaLoRA's `ranknum` is not a weight: PEFT derives it from the config and does not
                # store it.
                if (
                    id(parameter) not in base
                    and parameter.is_floating_point()
                    and "ranknum" not in name
                ):
                    parameter.mul_(1.5)
        CheckpointSaver().resume(self.out, model=again)
        return logits(again)

    def _empty(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def _once_more(ask: Numbers) -> Numbers:
    """Call `ask` with two seeds; None if the results differ."""

    def ask_twice() -> Any:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(ask())
        return found[0] if _are_near(*found) else None

    return ask_twice


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def _compared(wanted: Numbers, found: Numbers) -> str:
    try:
        ours = found()
    except errors.CheckpointError as error:
        return "" if str(error).strip() else "an error without words"
    except Exception as error:
        try:
            wanted()
        except Exception as other:
            if (type(other), str(other)) == (type(error), str(error)):
                return ""  # the model lacks an input, such as the task of each sample
        return f"{type(error).__name__}: {str(error)[:200]}"
    try:
        theirs = wanted()
    except Exception as error:
        return f"done, though PEFT raises {type(error).__name__}: {str(error)[:200]}"
    if theirs is None:
        return "done, though PEFT draws other numbers each time"
    return (
        ""
        if _are_near(ours, theirs)
        else f"other numbers than PEFT's, by {(ours - theirs).abs().max():.1e}"
    )
