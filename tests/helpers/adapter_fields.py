"""Trials of adapter configs with one changed setting: PEFT's outputs, or an error of ft_ckpt."""

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
ABSENT = object()  # the setting is left out
NUMBERS: list[Any] = [0, -1, 2, 5, 0.5, 1e300]
TEXTS: list[Any] = ["x", "(", "", "all-linear", ".*v_proj"]
LISTS: list[Any] = [[], ["x"], [0], [3, 5], [[0, 1]], ["q_proj"], ["lm_head"]]
MAPPINGS: list[Any] = [{}, {"x": 1}, {"(": 2}, {"q_proj": 2}]
VALUES: list[Any] = [ABSENT, None, True, False, *NUMBERS, *TEXTS, *LISTS, *MAPPINGS]
SHARED = {
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
}
# PEFT builds so many layers
ENDLESS = ("shadow_num_hidden_layers", 1e300)
Outputs = Callable[[], Any]  # computes logits


class FieldTrials:
    """A trained adapter in PEFT's folder and in a checkpoint, and variants of its config."""

    def __init__(self, method: str, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.base = folder / "base"
        self.peft_folder, self.unchanged = folder / "peft", folder / "unchanged"
        self.checkpoint = folder / "checkpoint"
        model: Any = make(ARCHITECTURES["llama-tied"])
        model.save_pretrained(self.base)
        self.plain: Any = AutoModelForCausalLM.from_pretrained(self.base)
        self.shapes_of_base = {parameter.shape for parameter in self.plain.parameters()}
        self.method = method
        make_config = {**METHODS, **UNMERGEABLE}[method]
        self.model: Any = with_adapter(self.fresh_base(), make_config(LINEAR))
        self.model.save_pretrained(self.peft_folder)
        CheckpointSaver().save(self.model, self.checkpoint, adapter_only=True)
        self.config = json.loads((self.peft_folder / "adapter_config.json").read_text())
        shutil.copytree(self.peft_folder, self.unchanged)

    def fresh_base(self) -> Any:
        return copy.deepcopy(self.plain)

    def all_changes(self) -> list[tuple[str, Any]]:
        """Return each field with each value that differs from its own.

        Fields that all methods share are changed for LoRA only.
        """
        changes = []
        for name, own_value in self.config.items():
            is_skipped = name in SHARED and self.method != "lora"
            # with this one PEFT draws numbers each time it computes
            if is_skipped or name == "sample_at_inference":
                continue
            is_number = type(own_value) in (int, float)
            near_values = [own_value + 1, own_value * 2] if is_number else []
            for value in (*VALUES, *near_values):
                is_own = type(value) is type(own_value) and value == own_value
                if not is_own and (name, value) != ENDLESS:
                    changes.append((name, value))
        return changes

    def problems_with(self, field: str, value: Any) -> Iterator[str]:
        """Yield the problems of the adapter with this change: one for each operation at most.

        The operations are merge, load_model, average, save and resume.
        """
        changed = {**self.config, field: value}
        if value is ABSENT:
            del changed[field]
        text = json.dumps(changed)
        (self.peft_folder / "adapter_config.json").write_text(text)
        edit(self.checkpoint, "adapter_config.json", text)
        shown = "absent" if value is ABSENT else repr(value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operation, expected, actual in self._operations():
                problem = _problem_of(expected, actual)
                if problem:
                    yield f"{self.method}: {field}={shown}: {operation}: {problem}"

    def _operations(self) -> Iterator[tuple[str, Outputs, Outputs]]:
        """Yield each operation with the outputs that are expected after it, and the actual ones."""
        by_peft = _reproducible(lambda: logits(self._loaded_by_peft()))
        yield "merge", _reproducible(self._merged_by_peft), self._merged
        yield "load_model", by_peft, self._loaded
        try:
            live = self._loaded_by_peft()
            outputs = logits(live)
        except Exception:
            return
        # reads files only: a config that PEFT refuses stays refused
        yield "average", by_peft, self._averaged
        yield "save", lambda: outputs, lambda: self._saved(live)
        yield "resume", lambda: outputs, lambda: self._resumed(live, live)
        # its outputs differ in inference mode, which `live` is in: the resume warns of that
        if self.method != "cpt":
            yield (
                "resume of the unchanged",
                lambda: logits(self.model),
                lambda: self._resumed(self.model, live),
            )

    def _loaded_by_peft(self) -> Any:
        return PeftModel.from_pretrained(self.fresh_base(), self.peft_folder)

    def _loaded(self) -> Any:
        return logits(ft_ckpt.load_model(self.checkpoint, base=self.fresh_base()))

    def _merged_by_peft(self) -> Any:
        live = self._loaded_by_peft()
        has_own_head = isinstance(live.get_base_model().get_output_embeddings(), BaseTunerLayer)
        # PEFT merges into the tied embeddings, too, and the outputs are others than before:
        # ft_ckpt stores both
        return logits(live if has_own_head else live.merge_and_unload())

    def _merged(self) -> Any:
        ft_ckpt.merge(self.peft_folder, self._empty("out"), base=self.base, progress=False)
        return logits(AutoModelForCausalLM.from_pretrained(self.out))

    def _averaged(self) -> Any:
        sources = [self.unchanged, self.peft_folder]
        ft_ckpt.average(sources, self._empty("out"), progress=False)
        return logits(PeftModel.from_pretrained(self.fresh_base(), self.out))

    def _saved(self, live: Any) -> Any:
        CheckpointSaver().save(live, self._empty("out"), adapter_only=True)
        return logits(ft_ckpt.load_model(self.out, base=self.fresh_base()))

    def _resumed(self, live: Any, other: Any) -> Any:
        """Return the outputs of a copy of `other` that has resumed the state of `live`.

        Its adapter weights were changed before.
        """
        CheckpointSaver().save_state(live, self._empty("out"))
        resumed = copy.deepcopy(other)
        base_ids = set()
        for parameter in resumed.get_base_model().parameters():
            if parameter.shape in self.shapes_of_base:
                base_ids.add(id(parameter))
        with torch.no_grad():
            for name, parameter in resumed.named_parameters():
                is_adapter = id(parameter) not in base_ids and parameter.is_floating_point()
                # AdaLoRA's `ranknum` is not a weight: PEFT derives it from the config and does not
                # store it.
                if is_adapter and "ranknum" not in name:
                    parameter.mul_(1.5)
        CheckpointSaver().resume(self.out, model=resumed)
        return logits(resumed)

    def _empty(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def _reproducible(compute: Outputs) -> Outputs:
    """Return a function that calls `compute` with two seeds: None if the outputs differ."""

    def compute_twice() -> Any:
        outputs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append(compute())
        return outputs[0] if _are_near(*outputs) else None

    return compute_twice


def _are_near(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)


def _problem_of(expected: Outputs, actual: Outputs) -> str:
    """Compare the outputs; an error of ft_ckpt with a text is no problem."""
    try:
        outputs = actual()
    except errors.CheckpointError as error:
        return "" if str(error).strip() else "an error without words"
    except Exception as error:
        try:
            expected()
        except Exception as peft_error:
            if (type(peft_error), str(peft_error)) == (type(error), str(error)):
                return ""  # the model lacks an input, such as the task of each sample
        return f"{type(error).__name__}: {str(error)[:200]}"
    try:
        peft_outputs = expected()
    except Exception as error:
        return f"done, though PEFT raises {type(error).__name__}: {str(error)[:200]}"
    if peft_outputs is None:
        return "done, though PEFT draws other numbers each time"
    if _are_near(outputs, peft_outputs):
        return ""
    return f"other numbers than PEFT's, by {(outputs - peft_outputs).abs().max():.1e}"
