"""Take the policy out of a checkpoint that holds more, and write it as a plain Hugging Face folder.

    python scripts/extract_policy.py runs/ppo/both runs/ppo/extracted

Any other model in the checkpoint can be taken with --part.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import print_saves
from transformers import AutoModelForCausalLM, AutoTokenizer

import ft_ckpt


def main() -> None:
    args = parse_arguments()
    policy = ft_ckpt.load_model(args.source, part=args.part)
    tokenizer = AutoTokenizer.from_pretrained(args.source / args.part)
    with ft_ckpt.CheckpointSaver(tokenizer=tokenizer) as saver:
        report = saver.save(policy, args.destination)
    print_saves([report])
    print(f"{args.prompt!r} continues: {generate(args.destination, args.prompt)!r}")


def generate(folder: Path, prompt: str) -> str:
    """Continue a prompt by the model in a folder, loaded with transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    options = {"max_new_tokens": 32, "do_sample": True, "pad_token_id": tokenizer.pad_token_id}
    output = model.generate(**inputs, **options)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="checkpoint with a part for each submodel, as ppo.py writes it"
    )
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--part", default="policy", help="which part to take (default %(default)s)")
    parser.add_argument(
        "--prompt", default="def ", help="what the extracted model continues (default %(default)r)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
