"""A tiny base model and data sets in the forms of the programs of tests/clients."""

import json
from pathlib import Path
from typing import Any

import models
import torch

ROWS = 24


def make_base(folder: Path) -> Path:
    """Write a Llama and its tokenizer to `folder/base`; return that folder."""
    torch.manual_seed(0)
    base: Any = models.llama(vocab_size=128)
    base.save_pretrained(folder / "base")
    models.tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def sentence(number: int, words: int = 5) -> str:
    """Return words of the tokenizer that depend on `number`."""
    return " ".join(f"w{(7 * number + 3 * word) % 80}" for word in range(words))


def write_llama_factory_data(folder: Path) -> Path:
    """Write the data sets `rows` (instructions) and `pairs` (preferences) to `folder/data`."""
    data = folder / "data"
    data.mkdir()
    rows, pairs = [], []
    for i in range(ROWS):
        row = {"instruction": sentence(i), "input": "", "output": sentence(i + 1)}
        rows.append(row)
        pairs.append({**row, "chosen": sentence(i + 2), "rejected": sentence(i + 3)})
    (data / "rows.json").write_text(json.dumps(rows))
    (data / "pairs.json").write_text(json.dumps(pairs))
    columns = {
        "prompt": "instruction",
        "query": "input",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    info: dict[str, Any] = {"rows": {"file_name": "rows.json"}}
    info["pairs"] = {"file_name": "pairs.json", "ranking": True, "columns": columns}
    (data / "dataset_info.json").write_text(json.dumps(info))
    return data


def write_swift_data(folder: Path) -> Path:
    """Write conversations of two turns to `folder/data.jsonl`."""
    lines = []
    for i in range(ROWS):
        turns = [
            {"role": "user", "content": sentence(i)},
            {"role": "assistant", "content": sentence(i + 1)},
        ]
        lines.append(json.dumps({"messages": turns}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"
