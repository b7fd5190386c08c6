"""Fine-tune a causal language model with Accelerate and save it with ft_ckpt.

    accelerate launch --config_file configs/ddp_cpu.yaml scripts/finetune.py --output-dir runs/full
    accelerate launch --config_file configs/ddp_cpu.yaml scripts/finetune.py --output-dir runs/lora \\
        --model runs/full/final --lora

Without --model a tiny OLMo-2 learns to write Python from the standard library's sources; nothing is downloaded.
The same script runs under every file of configs/: the saver looks at the model it is handed, not at the launcher.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import endless, get_tokenizer, make_accelerator, pack, print_saves, read_documents, tiny_olmo
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from ft_ckpt import CheckpointSaver, SaveReport


def main() -> None:
    args = parse_arguments()
    accelerator = make_accelerator()
    set_seed(args.seed)

    documents = read_documents(args.dataset)
    tokenizer = get_tokenizer(accelerator, args.model, documents)
    train, held_out = make_loaders(accelerator, pack(tokenizer, documents, args.sequence_length), args)
    model = make_model(tokenizer, args)
    optimizer, scheduler = make_optimizer(accelerator, model, args)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)

    # Every rank makes the saver and every rank saves: each holds a part of the weights when the model is sharded.
    settings = {"dtype": args.dtype, "max_shard_size": args.max_shard_size, "chat_template_name": args.chat_template}
    with CheckpointSaver(accelerator, tokenizer=tokenizer, **settings) as saver:
        reports = []
        for step, loss in training(accelerator, model, optimizer, scheduler, train, args):
            if args.save_every and step % args.save_every == 0:
                reports.append(save(saver, model, f"checkpoint-{step}", args, step, {"loss": loss}))
        final_loss = evaluate(accelerator, model, held_out)
        reports.append(save(saver, model, "final", args, args.steps, {"held_out_loss": final_loss}))

    if accelerator.is_main_process:
        print(f"held-out loss {final_loss:.3f}")
        print_saves(reports)


def save(
    saver: CheckpointSaver, model: Any, name: str, args: argparse.Namespace, step: int, metrics: dict[str, float]
) -> SaveReport:
    """Saves the wrapped model as it is: all of it, or with --lora the adapter alone."""
    return saver.save(model, args.output_dir / name, adapter_only=args.lora, step=step, metrics=metrics)


def make_model(tokenizer: Any, args: argparse.Namespace) -> Any:
    """The model of --model or a tiny one; with --lora its weights are frozen and adapters added."""
    if args.model is None:
        model: Any = tiny_olmo(tokenizer)
    else:
        # Full training keeps float32 weights (mixed precision is the launcher's business); frozen ones stay small.
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto" if args.lora else torch.float32)
    if args.lora:
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=args.lora_alpha, target_modules="all-linear"
        )
        model = get_peft_model(model, lora)
    return model


def make_loaders(
    accelerator: Accelerator, blocks: torch.Tensor, args: argparse.Namespace
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of [batch, length] token tensors: every twentieth block is held out (at most 16 batches a rank)."""
    world = args.batch_size * accelerator.num_processes
    kept = torch.arange(len(blocks)) % 20 != 19
    train, held_out = blocks[kept], blocks[~kept][: 16 * world]
    if len(train) < world or not len(held_out):
        raise SystemExit(
            f"{len(blocks)} blocks of {args.sequence_length} tokens are too few for {accelerator.num_processes} "
            f"processes with batches of {args.batch_size}: give more text, or lower --sequence-length or --batch-size"
        )
    return (
        DataLoader(train, args.batch_size, shuffle=True, drop_last=True),  # type: ignore[arg-type]
        DataLoader(held_out, args.batch_size),  # type: ignore[arg-type]
    )


def make_optimizer(
    accelerator: Accelerator, model: torch.nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW on what is trainable, and a cosine schedule with a tenth of the steps to warm up."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, betas=(0.9, 0.95))
    ticks = args.steps * accelerator.num_processes  # Accelerate moves the schedule once per process and step
    return optimizer, get_cosine_schedule_with_warmup(optimizer, ticks // 10, ticks)


def training(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any, args: argparse.Namespace
) -> Iterator[tuple[int, float]]:
    """Trains, and yields (step, loss) after each step that is logged or saved; steps count from 1.

    On rank 0 the loss appears in a progress bar when the output is a terminal, else on a line every --log-every steps.
    """
    bar = accelerator.is_main_process and sys.stdout.isatty()
    with Progress(disable=not bar) as progress:
        task = progress.add_task("training", total=args.steps)
        for step, batch in enumerate(islice(endless(loader), args.steps), start=1):
            loss = train_step(accelerator, model, optimizer, scheduler, batch)
            progress.advance(task)
            if step == 1 or step == args.steps or is_due(step, args.log_every) or is_due(step, args.save_every):
                mean = accelerator.reduce(loss, "mean").item()
                progress.update(task, description=f"loss {mean:.3f}")
                if accelerator.is_main_process and not bar:
                    print(f"step {step}/{args.steps} loss {mean:.3f}", flush=True)
                yield step, mean


def train_step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batch: Any) -> torch.Tensor:
    """One optimizer step; this rank's loss, a scalar tensor on the device."""
    model.train()
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> float:
    """The mean loss over the held-out batches of all ranks."""
    model.eval()
    losses = torch.stack([model(input_ids=batch, labels=batch).loss for batch in loader])
    return accelerator.reduce(losses.mean(), "mean").item()


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="checkpoint-N and final are written here")
    add("--model", help="folder with config, weights and tokenizer; default: a tiny OLMo-2 from scratch")
    add("--dataset", type=Path, help="text file, or JSONL with `text` or `messages`; default: Python's sources")
    add("--steps", type=int, default=150, help="optimizer steps (default %(default)s)")
    add("--batch-size", type=int, default=16, help="sequences per process and step (default %(default)s)")
    add("--sequence-length", type=int, default=64, help="tokens (default %(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="peak of the schedule (default %(default)s)")
    add("--lora", action="store_true", help="train and save a LoRA adapter on all linear layers")
    add("--lora-r", type=int, default=8, help="rank of the adapter (default %(default)s)")
    add("--lora-alpha", type=int, default=16, help="the adapter is scaled by alpha/r (default %(default)s)")
    add("--save-every", type=int, default=0, help="steps between checkpoints, 0 for the final save alone")
    add("--log-every", type=int, default=25, help="steps between lines (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="as_is", help="of the saved weights: as_is, config, float32, bfloat16, ...")
    add("--max-shard-size", default="50GB", help="largest weight file (default %(default)s)")
    add("--chat-template", help="name that decides the generation config, e.g. olmo; default: keep the model's")
    args = parser.parse_args()
    if args.lora and args.model is None:
        parser.error("--lora needs --model: the folder of a model or of an earlier run, such as runs/full/final")
    return args


if __name__ == "__main__":
    main()
