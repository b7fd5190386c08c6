"""Train with GRPO: two ranks, a rollout process and a replay buffer write one checkpoint together.

    python scripts/grpo.py --output-dir runs/grpo     # started again after a kill, it goes on

All on CPU, with a small model with random weights; nothing is downloaded. The reward of a
completion is the share of its tokens that repeat the prompt's token. Groups whose completions all
have the same reward teach nothing: they are dropped. The replay buffer owns the `Frontier` of the
prompts, so no prompt is lost or trained twice, and holds groups that were generated and not yet
trained. Each process but the second rank has state of its own; all of it is in the checkpoint of a
step, or there is none.

OUTPUT_DIR/ledger.jsonl has a line for each step: its loss, bit for bit, and the prompts that were
trained and dropped.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import CheckpointSaver, Frontier, Writer
from ft_ckpt.extensions.rl.samples.frontier import Ticket

RANKS = 2
VOCABULARY, LENGTH, COMPLETIONS = 16, 6, 4
GENERATED, TRAINED = 3, 2  # groups a step


class Group(NamedTuple):
    """The completions of one prompt."""

    ticket: Ticket
    version: int  # the step of the weights that generated them
    tokens: Tensor  # (COMPLETIONS, 1 + LENGTH), the prompt's token first
    rewards: Tensor  # (COMPLETIONS,)


def main(words: list[str] | None = None) -> int:
    """Run all processes until the training ends, or one of them does; return the exit code."""
    args = parse_arguments(words)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # Forked, so that the libraries are loaded once. With accelerators use "spawn", or start the
    # processes yourself.
    context = multiprocessing.get_context("fork")
    pipes = {name: context.Pipe() for name in ("rollout", "replay")}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {**address, "WORLD_SIZE": str(RANKS)}
    trainer_ends = {name: trainer_end for name, (trainer_end, _) in pipes.items()}
    work: dict[str, Callable[[], None]] = {
        "rollout": partial(serve_rollouts, pipes["rollout"][1], args),
        "replay": partial(serve_replay, pipes["replay"][1], args),
    }
    for rank in range(RANKS):
        work[f"rank {rank}"] = partial(train, rank, trainer_ends, args)
    processes = {}
    for name, action in work.items():
        processes[name] = context.Process(target=run_process, args=(action,), name=name)
    for process in processes.values():
        process.start()
    try:
        return wait_for(processes)
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def wait_for(processes: dict[str, Any]) -> int:
    """Wait for all; return 1 as soon as one fails, because the others cannot go on without it."""
    while any(process.is_alive() for process in processes.values()):
        for name, process in processes.items():
            if process.exitcode not in (None, 0):
                print(
                    f"{name} ended with {process.exitcode}; start again to go on", file=sys.stderr
                )
                return 1
        time.sleep(0.02)
    return max(int(process.exitcode or 0) != 0 for process in processes.values())


def run_process(action: Callable[[], None]) -> None:
    """Do `action` in this process, which ends with the parent.

    A Ctrl-C reaches all processes, and the parent ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = os.getppid()

    def follow_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    action()


# The trainer


def train(rank: int, pipes: dict[str, Connection], args: argparse.Namespace) -> None:
    """Train on one rank.

    Rank 0 talks to the other processes, and gives each rank its groups.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    accelerator = Accelerator(cpu=True)
    model = make_model(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    settings = {"every": args.every, "keep": 2, "background": args.background}
    with CheckpointSaver(accelerator, args.output_dir, **settings) as saver:
        saver.resume()
        session = saver.invite("replay", "rollout", timeout_seconds=60)
        if rank == 0:
            for pipe in pipes.values():
                pipe.send(("join", session))
        while saver.progress.step < args.steps:
            step = saver.progress.step + 1
            groups: list[Group] = []
            dropped: list[Ticket] = []
            if rank == 0:
                groups, dropped = next_groups(pipes, model, step)
            groups = share(groups)
            loss = grpo_loss(model, groups[rank::RANKS])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            if rank == 0:
                ask(pipes["replay"], "trained", [group.ticket for group in groups])
                note(args.output_dir / "ledger.jsonl", step, mean, groups, dropped)
                # before the trainer saves: their state of this step
                if step % args.every == 0 or step == args.steps:
                    for pipe in pipes.values():
                        ask(pipe, "hand in", step)
            saver.step({"loss": mean})
        saver.wait()
        if rank == 0:
            print(f"{saver.progress.step} steps: {ask(pipes['replay'], 'counts', None)}")
            for pipe in pipes.values():
                pipe.send(("end", None))


def next_groups(
    pipes: dict[str, Connection], model: Any, step: int
) -> tuple[list[Group], list[Ticket]]:
    """Return the groups to train in `step`, and the prompts that were dropped meanwhile."""
    dropped: list[Ticket] = []
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    while True:
        tickets = ask(pipes["replay"], "take", GENERATED)
        if tickets:
            generated = ask(pipes["rollout"], "generate", (step - 1, weights, tickets))
            dropped += ask(pipes["replay"], "add", generated)
        groups = ask(pipes["replay"], "batch", TRAINED)
        if len(groups) == TRAINED:
            return groups, dropped
        if not tickets:
            raise SystemExit(
                f"step {step}: all prompts are used up; give more --prompts or --epochs"
            )


def share(groups: list[Group]) -> list[Group]:
    """Send the groups of rank 0 to every rank. Collective."""
    shared = [groups]
    torch.distributed.broadcast_object_list(shared)
    return shared[0]


def grpo_loss(model: Any, groups: list[Group]) -> Tensor:
    """Return the mean of advantages times log probabilities over the tokens, negated.

    Advantages are those within a group.
    """
    losses = []
    for group in groups:
        advantages = (group.rewards - group.rewards.mean()) / (group.rewards.std() + 1e-4)
        logits = model(input_ids=group.tokens[:, :-1]).logits.log_softmax(-1)
        chosen = logits.gather(-1, group.tokens[:, 1:, None])[..., 0]
        losses.append(-(advantages[:, None] * chosen).mean())
    # ranks without a group take part, too
    zero = sum(parameter.sum() for parameter in model.parameters()) * 0.0
    return sum(losses, zero) / max(len(losses), 1)


def note(ledger: Path, step: int, loss: float, groups: list[Group], dropped: list[Ticket]) -> None:
    line = {
        "step": step,
        "loss": loss.hex(),
        "trained": [(group.ticket.key, group.version) for group in groups],
        "dropped": [ticket.key for ticket in dropped],
    }
    with ledger.open("a") as file:
        file.write(json.dumps(line) + "\n")


# The rollout process


def serve_rollouts(pipe: Connection, args: argparse.Namespace) -> None:
    """Generate completions; the state of this process is that of its generator."""
    model, generator = make_model(args.seed), torch.Generator().manual_seed(args.seed)
    with Writer(args.output_dir, "rollout", session=pipe.recv()[1]) as writer:
        part = writer.resume()
        if part is not None:
            generator.set_state(part.state["generator"])
        for action, argument in requests(pipe):
            if action == "generate":
                version, weights, tickets = argument
                model.load_state_dict(weights)
                pipe.send([generate(model, generator, ticket, version) for ticket in tickets])
            else:
                writer.put(argument, {"generator": generator.get_state()})
                pipe.send(None)


@torch.no_grad()
def generate(model: Any, generator: torch.Generator, ticket: Ticket, version: int) -> Group:
    tokens = torch.full((COMPLETIONS, 1), ticket.id % VOCABULARY)
    for _ in range(LENGTH):
        chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return Group(ticket, version, tokens, (tokens[:, 1:] == tokens[:, :1]).float().mean(1))


# The replay buffer


def serve_replay(pipe: Connection, args: argparse.Namespace) -> None:
    """Hold the position in the prompts, and the groups that were generated and not yet trained."""
    frontier = Frontier(args.prompts, epochs=args.epochs, shuffle=True, seed=args.seed)
    groups: list[Group] = []
    with Writer(args.output_dir, "replay", session=pipe.recv()[1]) as writer:
        part = writer.resume()
        if part is not None:
            frontier.load_state_dict(part.state["frontier"])
            stored = [Group(Ticket(*ticket), *values) for ticket, *values in part.state["groups"]]
            tickets = frontier.renew(*(group.ticket for group in stored))
            for group, ticket in zip(stored, tickets, strict=True):
                groups.append(group._replace(ticket=ticket))
        for action, argument in requests(pipe):
            answer: Any = None
            if action == "take":
                answer = frontier.take(argument)
            elif action == "add":
                useful, equal_rewards = divide_by_rewards(argument)
                groups += useful
                answer = [group.ticket for group in equal_rewards]
                frontier.dropped(*answer)
            elif action == "batch":
                answer = groups[:argument]
            elif action == "trained":
                frontier.trained(*argument)
                groups = [group for group in groups if group.ticket not in argument]
            elif action == "counts":
                answer = frontier.counts
            else:
                rows: list[Any] = []
                for group in groups:
                    ticket = list(group.ticket)
                    rows.append([ticket, group.version, group.tokens, group.rewards])
                writer.put(argument, {"frontier": frontier.state_dict(), "groups": rows})
            pipe.send(answer)


def divide_by_rewards(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups with different rewards, and those whose rewards are all equal."""
    useful: list[Group] = []
    equal_rewards: list[Group] = []
    for group in groups:
        is_equal = group.rewards.min() == group.rewards.max()
        (equal_rewards if is_equal else useful).append(group)
    return useful, equal_rewards


def requests(pipe: Connection) -> Iterator[tuple[str, Any]]:
    """Yield the requests of the trainer, until it ends."""
    while True:
        action, argument = pipe.recv()
        if action == "end":
            return
        yield action, argument


def ask(pipe: Connection, action: str, argument: Any) -> Any:
    """Send a request to the process at the other end, and return its response."""
    pipe.send((action, argument))
    return pipe.recv()


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--prompts", type=int, default=24, help="number of prompts")
    parser.add_argument("--epochs", type=int, default=4, help="of the prompts")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--background", action=argparse.BooleanOptionalAction, default=True, help="save meanwhile"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
