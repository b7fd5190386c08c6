"""Train a LoRA adapter and publish each checkpoint into a running server of vLLM or SGLang.

    python scripts/serve.py --output-dir runs/served    # a tiny base, and how to start a server
    python scripts/serve.py --output-dir runs/served --url http://127.0.0.1:8000

Without --model the base is a small OLMo-2 with random weights that is written to OUTPUT_DIR/base;
nothing is downloaded. With several --url all servers get each checkpoint, or none. A publish that
fails is a warning.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import check_enough, get_tokenizer, make_accelerator, pack, read_documents, tiny_olmo
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ft_ckpt import CheckpointSaver, Every, Keep


def main() -> None:
    args = parse_arguments()
    accelerator = make_accelerator()
    set_seed(args.seed)
    base = Path(args.model or args.output_dir / "base")
    if args.model is None and not base.exists():
        write_base(accelerator, base)
    if not args.url:
        print(
            "start a server, then give its address with --url:\n"
            f"    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {base} --enable-lora "
            "--max-lora-rank 16"
        )
        return
    train(accelerator, base, args)


def write_base(accelerator: Accelerator, base: Path) -> None:
    """Write a base model that servers can run: its heads have 64 dimensions."""
    tokenizer = get_tokenizer(accelerator, None, read_documents(None))
    model = tiny_olmo(tokenizer, hidden_size=256).to(torch.bfloat16)
    with CheckpointSaver(accelerator, tokenizer=tokenizer) as saver:
        saver.save(model, base)


def train(accelerator: Accelerator, base: Path, args: argparse.Namespace) -> None:
    """Train, save every --save-every steps, and print the servers' version after each save."""
    tokenizer = get_tokenizer(accelerator, str(base), [])
    rows = pack(tokenizer, read_documents(args.dataset), 64)
    check_enough(rows, 16 * accelerator.num_processes)
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    loader = DataLoader(rows, 16, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    settings: dict[str, Any] = {"every": Every(steps=args.save_every), "keep": Keep(last=4)}
    settings |= {"tokenizer": tokenizer, "publish": {"url": args.url, "name": args.name}}
    with CheckpointSaver(accelerator, args.output_dir / "run", **settings) as saver:
        saver.resume()
        for batch in saver.remaining(loader):
            if saver.progress.step >= args.steps:
                break
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            report = saver.step({"loss": loss.item()})
            if report is not None and report.publish is not None:
                report.publish.wait()  # so that it can be printed; training needs not wait
                show(report.publish)


def show(publish: Any) -> None:
    """Print the version of each server; an error was a warning already."""
    if publish.future.exception() is not None:
        return
    report = publish.result()
    if report is not None:
        for server in report.servers:
            print(f"{server.url} ({server.engine}) serves {report.name}: {server.checked}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="the base and the run are written here")
    add(
        "--url",
        action="append",
        help="address of a server that was started with the base; may be repeated",
    )
    add("--model", help="folder of the base; default: a small OLMo-2 with random weights")
    add(
        "--dataset",
        type=Path,
        help="text file, or JSONL with `text` or `messages`; default: Python's sources",
    )
    add(
        "--name",
        default="policy",
        help="of the adapter on the servers, before the @ (default %(default)s)",
    )
    add("--steps", type=int, default=30, help="optimizer steps (default %(default)s)")
    add(
        "--save-every", type=int, default=10, help="steps between checkpoints (default %(default)s)"
    )
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
