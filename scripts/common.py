"""Texts, a tokenizer, a tiny model and a table of saves, for the example scripts."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from ft_ckpt import SaveReport

Document = str | list[dict[str, str]]  # a text, or the messages of a conversation

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_accelerator() -> Accelerator:
    """Make the Accelerator of this process.

    It is on the CPU where a launcher started it and there is no other device. Without that setting
    each rank of `accelerate launch` on a CPU-only machine acts as the only one, trains by itself
    and overwrites the others' files.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ft_ckpt").setLevel(logging.INFO)  # what is resumed, saved and deleted
    launched = "RANK" in os.environ
    return Accelerator(cpu=launched and not torch.accelerator.is_available())


def read_documents(dataset: Path | None) -> list[Document]:
    """Read the documents of a text or JSONL file (fields "text" or "messages").

    Without a file they are Python's own sources.
    """
    if dataset is None:
        return list(standard_library())
    text = dataset.read_text(encoding="utf-8")
    if dataset.suffix != ".jsonl":
        return [text]
    documents: list[Document] = []
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            documents.append(row["messages"] if "messages" in row else row["text"])
    return documents


def standard_library(limit_bytes: int = 1_500_000) -> Iterable[str]:
    """Yield whole modules of the standard library by name, at most `limit_bytes` together."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        limit_bytes -= len(text)
        if limit_bytes < 0:
            return
        yield text


def get_tokenizer(
    accelerator: Accelerator, model: str | None, documents: Sequence[Document]
) -> Any:
    """Load the tokenizer of a model folder, or train one on the documents.

    Rank 0 trains it, and sends it to every rank.
    """
    if model is not None:
        return AutoTokenizer.from_pretrained(model)
    trained = [train_bpe(documents).to_str() if accelerator.is_main_process else ""]
    broadcast_object_list(trained)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained[0]),
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
    )


def train_bpe(documents: Sequence[Document], vocabulary_size: int = 2048) -> Tokenizer:
    """Train a byte-level BPE, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    return tokenizer


def pack(tokenizer: Any, documents: Sequence[Document], length: int) -> torch.Tensor:
    """Join all documents into one stream of tokens, cut into rows: int64 [rows, length]."""
    texts = []
    for document in documents:
        if isinstance(document, str):
            texts.append(document)
        else:
            texts.append(tokenizer.apply_chat_template(document, tokenize=False))
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    stream: list[int] = []
    for ids in encoded["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    rows = len(stream) // length
    return torch.tensor(stream[: rows * length]).view(rows, length)


def check_enough(rows: torch.Tensor, needed: int) -> None:
    """End the program if a text is too short for a batch on every process."""
    if len(rows) < needed:
        raise SystemExit(
            f"the text makes {len(rows)} rows of {rows.shape[1]} tokens, {needed} are needed: give "
            "more text with --dataset, or shorter rows or smaller batches"
        )


def tiny_olmo(tokenizer: Any, hidden_size: int = 128) -> Olmo2ForCausalLM:
    """Make an OLMo-2 of two layers and four heads: about a million random parameters."""
    config = Olmo2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Olmo2ForCausalLM(config)


def print_saves(reports: Sequence[SaveReport]) -> None:
    """Print a table with one line for each save, and the saver's notes below it."""
    table = Table(title="saved")
    for heading in ("checkpoint", "kind", "tensors", "size", "time", "casts"):
        table.add_column(heading, overflow="fold")
    for report in reports:
        casts = ", ".join(f"{count} x {cast}" for cast, count in report.casts.items())
        size, time = f"{report.bytes / 1e6:.1f} MB", f"{report.seconds:.2f} s"
        path = report.path
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        table.add_row(str(path), report.kind, str(report.tensors), size, time, casts or "none")
    console = Console()
    console.print(table)
    notes: dict[str, None] = {}
    for report in reports:
        notes |= dict.fromkeys(report.notes)
    for note in notes:
        console.print(f"note: {note}")


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        if isinstance(document, str):
            yield document
        else:
            yield from (message["content"] for message in document)
