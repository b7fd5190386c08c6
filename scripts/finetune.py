"""Fine-tune a causal language model with Accelerate and save it with ft_ckpt.

    accelerate launch --config_file configs/ddp_cpu.yaml scripts/finetune.py --output-dir runs/full
    accelerate launch --config_file configs/ddp_cpu.yaml scripts/finetune.py --output-dir runs/lora
    \\
        --model runs/full/final --lora

Without --model a tiny OLMo-2 learns to write Python from the standard library's sources; nothing is
downloaded. The same script runs under every file of configs/: the saver looks at the model it is
handed, not at the launcher. Started again with the same --output-dir it resumes from its newest
checkpoint, on any number of processes.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import (
    check_enough,
    get_tokenizer,
    make_accelerator,
    pack,
    print_saves,
    read_documents,
    tiny_olmo,
)
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from ft_ckpt import CheckpointSaver, Every, Keep, SaveReport


def main() -> None:
    args = parse_arguments()
    accelerator = make_accelerator()
    set_seed(args.seed)

    documents = read_documents(args.dataset)
    tokenizer = get_tokenizer(accelerator, args.model, documents)
    blocks = pack(tokenizer, documents, args.sequence_length)
    train, held_out = make_loaders(accelerator, blocks, args)
    model = make_model(tokenizer, args)
    optimizer, scheduler = make_optimizer(accelerator, model, args)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        model, optimizer, train, held_out, scheduler
    )
    learner = Learner(accelerator, model, optimizer, scheduler)

    # Every rank makes the saver and every rank saves: each holds a part of the weights when the
    # model is sharded.
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "max_shard_size": args.max_shard_size,
        "chat_template_name": args.chat_template,
    }
    settings |= {"every": Every(steps=args.save_every or None), "keep": Keep(last=args.keep)}
    with CheckpointSaver(accelerator, args.output_dir, tokenizer=tokenizer, **settings) as saver:
        saver.resume(args.resume)
        reports = list(training(learner, saver, train, args))
        final_loss = learner.evaluate(held_out)
        facts = {"step": args.steps, "metrics": {"held_out_loss": final_loss}}
        path = args.output_dir / "final"
        reports.append(saver.save(model, path, adapter_only=args.lora, **facts))

    if accelerator.is_main_process:
        print(f"held-out loss {final_loss:.3f}")
        print_saves(reports)
    # the ranks leave together: one that ends alone may take the others down
    accelerator.end_training()


def make_model(tokenizer: Any, args: argparse.Namespace) -> Any:
    """Load the model of --model, or make a tiny one; with --lora freeze it and add adapters."""
    if args.model is None:
        model: Any = tiny_olmo(tokenizer)
    else:
        # Full training has float32 weights, and the launcher chooses mixed precision; frozen ones
        # stay small.
        dtype = "auto" if args.lora else torch.float32
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    if args.lora:
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=args.lora_r,
            lora_alpha=args.lora_alpha,
            target_modules="all-linear",
        )
        model = get_peft_model(model, lora)
    return model


def make_loaders(
    accelerator: Accelerator, blocks: torch.Tensor, args: argparse.Namespace
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Make loaders of [batch, length] tokens: for training, and of every twentieth block.

    The latter is held out: at most 16 batches on each rank.
    """
    batch_of_all = args.batch_size * accelerator.num_processes
    check_enough(blocks, max(20, 2 * batch_of_all))
    is_train = torch.arange(len(blocks)) % 20 != 19
    train, held_out = blocks[is_train], blocks[~is_train][: 16 * batch_of_all]
    return (
        DataLoader(train, args.batch_size, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        DataLoader(held_out, args.batch_size),  # type: ignore[arg-type]
    )


def make_optimizer(
    accelerator: Accelerator, model: torch.nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, Any]:
    """Make AdamW for the trainable parameters, and a cosine schedule.

    A tenth of its steps warm up.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, betas=(0.9, 0.95))
    # Accelerate moves the schedule once per process and step
    ticks = args.steps * accelerator.num_processes
    return optimizer, get_cosine_schedule_with_warmup(optimizer, ticks // 10, ticks)


@dataclass(frozen=True)
class Learner:
    """The objects that Accelerate has prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        """Make an optimizer step; return this rank's loss before it, a scalar on the device."""
        self.model.train()
        loss = self.model(input_ids=batch, labels=batch).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, loader: Iterable[torch.Tensor]) -> float:
        """Return the mean loss over the batches of all ranks. Collective."""
        self.model.eval()
        losses = torch.stack([self.model(input_ids=batch, labels=batch).loss for batch in loader])
        return self.accelerator.reduce(losses.mean(), "mean").item()


def training(
    learner: Learner,
    saver: CheckpointSaver,
    loader: Iterable[torch.Tensor],
    args: argparse.Namespace,
) -> Iterator[SaveReport]:
    """Train from the saver's position up to --steps; yield the report of each save.

    On rank 0 the loss appears in a progress bar when the output is a terminal, else on a line every
    --log-every steps; with --losses every step's is appended to a file.
    """
    is_main = learner.accelerator.is_main_process
    has_bar = is_main and sys.stdout.isatty()
    prints = is_main and not has_bar
    log_file = open_log(args.losses if is_main else None)
    with Progress(disable=not has_bar) as progress, log_file as log:
        task = progress.add_task("training", total=args.steps, completed=saver.progress.step)
        while saver.progress.step < args.steps:
            for batch in saver.remaining(loader):
                loss = learner.accelerator.reduce(learner.learn(batch), "mean").item()
                step = saver.progress.step + 1
                log.write(f"{step} {loss!r}\n")
                progress.update(task, advance=1, description=f"loss {loss:.3f}")
                is_logged = args.log_every > 0 and step % args.log_every == 0
                if prints and (is_logged or step in (1, args.steps)):
                    print(f"step {step}/{args.steps} loss {loss:.3f}", flush=True)
                report = saver.step({"loss": loss})
                if report is not None:
                    yield report
                if step == args.steps:
                    break


def open_log(path: Path | None) -> TextIO:
    """Open a file to append lines to; the null device without a path."""
    if path is None:
        return Path(os.devnull).open("w")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="checkpoint-N and final are written here")
    add(
        "--model",
        help="folder with config, weights and tokenizer; default: a tiny OLMo-2 from scratch",
    )
    add(
        "--dataset",
        type=Path,
        help="text file, or JSONL with `text` or `messages`; default: Python's sources",
    )
    add("--steps", type=int, default=150, help="optimizer steps (default %(default)s)")
    add(
        "--batch-size",
        type=int,
        default=16,
        help="sequences per process and step (default %(default)s)",
    )
    add("--sequence-length", type=int, default=64, help="tokens (default %(default)s)")
    add(
        "--learning-rate",
        type=float,
        default=1e-2,
        help="peak of the schedule (default %(default)s)",
    )
    add("--lora", action="store_true", help="train and save a LoRA adapter on all linear layers")
    add("--lora-r", type=int, default=8, help="rank of the adapter (default %(default)s)")
    add(
        "--lora-alpha",
        type=int,
        default=16,
        help="the adapter is scaled by alpha/r (default %(default)s)",
    )
    add(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints, 0 for signals and the final save alone",
    )
    add("--keep", type=int, default=2, help="checkpoints to keep on the way (default %(default)s)")
    add("--resume", default="auto", help="auto (default), never, must, or a checkpoint's name")
    add("--losses", type=Path, help="append every step's loss to this file")
    add("--log-every", type=int, default=25, help="steps between lines (default %(default)s)")
    add("--seed", type=int, default=0)
    add(
        "--dtype",
        default="as_is",
        help="of the saved weights: as_is, config, float32, bfloat16, ...",
    )
    add("--max-shard-size", default="50GB", help="largest weight file (default %(default)s)")
    add(
        "--chat-template",
        help="name that decides the generation config, e.g. olmo; default: keep the model's",
    )
    args = parser.parse_args()
    if args.lora and args.model is None:
        parser.error(
            "--lora needs --model: the folder of a model or of an earlier run, such as "
            "runs/full/final"
        )
    return args


if __name__ == "__main__":
    main()
