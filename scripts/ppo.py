"""Train with PPO and save with ft_ckpt: policy and value head are in one module.

    accelerate launch --config_file configs/ddp_cpu.yaml scripts/ppo.py --output-dir runs/ppo
    python scripts/extract_policy.py runs/ppo/both runs/ppo/extracted

The reward is the share of generated tokens that match --target, by default a space and a lower-case
word. Without --model the policy is a tiny OLMo-2 with random weights. The script runs under DDP,
FSDP2 and ZeRO-2; not under ZeRO-3, where the reference model would need an engine, too.
"""

import argparse
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
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
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name everyone reads without thinking
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ft_ckpt import CheckpointSaver, Every, Keep


class ActorCritic(nn.Module):
    """Policy and value head as one module: Accelerate's sharding engines take one model each."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        size = policy.config.hidden_size
        self.policy = policy
        self.value_head = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
        self._no_split_modules = policy._no_split_modules  # where FSDP may cut

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [batch, length, vocabulary] and values [batch, length, 1] of tokens.

        The tokens are [batch, length].
        """
        output = self.policy(input_ids=tokens, output_hidden_states=True, use_cache=False)
        return output.logits, self.value_head(output.hidden_states[-1])


@dataclass(frozen=True)
class Rollout:
    """A batch of prompts with the tokens drawn for them.

    All fields but `tokens` are [batch, new tokens].
    """

    tokens: Tensor  # [batch, prompt + new tokens]
    log_probs: Tensor  # of the new tokens when they were drawn
    values: Tensor  # expected return before each new token
    rewards: Tensor  # per token: minus the KL penalty, plus the score at the last one
    scores: Tensor  # share of new tokens that match the target, in every column

    def rows(self, index: Tensor) -> "Rollout":
        """Select rows of every tensor."""
        return Rollout(*(getattr(self, field.name)[index] for field in fields(self)))


def main() -> None:
    args = parse_arguments()
    accelerator = make_accelerator()
    set_seed(args.seed)  # every rank makes the same policy

    documents = read_documents(args.dataset)
    tokenizer = get_tokenizer(accelerator, args.model, documents)
    target = matching_tokens(tokenizer, args.target).to(accelerator.device)
    rows = pack(tokenizer, documents, args.prompt_length)
    check_enough(rows, args.batch_size * accelerator.num_processes)
    prompts: Any = DataLoader(rows, args.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    policy = make_policy(tokenizer, args)
    reference = copy.deepcopy(policy).eval().requires_grad_(False).to(accelerator.device)
    model: Any = ActorCritic(policy)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
    model, optimizer, prompts = accelerator.prepare(model, optimizer, prompts)
    set_seed(args.seed, device_specific=True)  # and draws other tokens

    schedule = {"every": Every(steps=args.save_every or None), "keep": Keep(last=2)}
    with CheckpointSaver(accelerator, args.output_dir, tokenizer=tokenizer, **schedule) as saver:
        saver.resume()  # started again with the same --output-dir, it goes on where it was
        while saver.progress.step < args.iterations:
            for batch in saver.remaining(prompts):
                rollout = sample(model, reference, batch, target, args)
                score = accelerator.reduce(rollout.scores.mean(), "mean").item()
                if accelerator.is_main_process:
                    iteration = f"iteration {saver.progress.step + 1}/{args.iterations}"
                    print(f"{iteration} mean reward {score:.3f}", flush=True)
                for loss in losses(model, rollout, args):
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                saver.step({"reward": score})
                if saver.progress.step == args.iterations:
                    break
        reports = []
        for name, attribute in (("both", ["policy", "value_head"]), ("policy", "policy")):
            path = args.output_dir / name
            reports.append(saver.save(model, path, attribute=attribute, step=args.iterations))
    if accelerator.is_main_process:
        print_saves(reports)
    # the ranks leave together: one that ends alone may take the others down
    accelerator.end_training()


def make_policy(tokenizer: Any, args: argparse.Namespace) -> Any:
    if args.model is None:
        return tiny_olmo(tokenizer)
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)


def matching_tokens(tokenizer: Any, target: str) -> Tensor:
    """Return the mask of tokens whose text matches the pattern in full: bool [vocabulary]."""
    tokens = [[token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
    return torch.tensor([re.fullmatch(target, text) is not None for text in texts])


@torch.no_grad()
def sample(
    model: Any, reference: Any, prompts: Tensor, target: Tensor, args: argparse.Namespace
) -> Rollout:
    """Continue each prompt by --new-tokens tokens drawn from the policy, and score them.

    Every step goes through the wrapped model's own forward, the only way that works under every
    kind of sharding.
    """
    model.eval()
    tokens = prompts
    for _ in range(args.new_tokens):
        logits, _ = model(tokens)
        # embeddings may have more rows than the tokenizer has tokens
        token_logits = logits[:, -1, : len(target)]
        drawn = torch.multinomial(token_logits.float().softmax(-1), num_samples=1)
        tokens = torch.cat([tokens, drawn], dim=1)
    logits, values = model(tokens)
    log_probs, _ = judge(logits, tokens, args.new_tokens)
    reference_log_probs, _ = judge(reference(tokens).logits, tokens, args.new_tokens)
    values = before_new(values, args.new_tokens).squeeze(-1)
    score = target[tokens[:, -args.new_tokens :]].float().mean(dim=1, keepdim=True)
    rewards = -args.kl * (log_probs - reference_log_probs)
    rewards[:, -1:] += score
    return Rollout(tokens, log_probs, values, rewards, score.expand_as(rewards))


def judge(logits: Tensor, tokens: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the last `new_tokens` tokens, and the entropies there.

    Both are [batch, new_tokens].
    """
    distribution = before_new(logits, new_tokens).log_softmax(-1)
    log_probs = distribution.gather(-1, tokens[:, -new_tokens:, None]).squeeze(-1)
    return log_probs, -(distribution.exp() * distribution).sum(-1)


def before_new(output: Tensor, new_tokens: int) -> Tensor:
    """Return the outputs, in float32, where the last `new_tokens` tokens are predicted."""
    return output[:, -new_tokens - 1 : -1].float()


def losses(model: Any, rollout: Rollout, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield a loss for each minibatch, --epochs times over the rollout.

    It is the sum of the clipped policy ratio, the error of the values, and minus the entropy.
    """
    model.train()
    advantages = generalized_advantages(rollout, args)
    returns = advantages + rollout.values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    size = max(1, len(rollout.tokens) // args.minibatches)
    for _ in range(args.epochs):
        order = torch.randperm(len(rollout.tokens), device=rollout.tokens.device)
        for index in order.split(size):
            part, advantage = rollout.rows(index), advantages[index]
            logits, values = model(part.tokens)
            log_probs, entropy = judge(logits, part.tokens, args.new_tokens)
            values = before_new(values, args.new_tokens).squeeze(-1)
            ratio = (log_probs - part.log_probs).exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = F.mse_loss(values, returns[index])
            yield policy_loss + 0.5 * value_loss - args.entropy * entropy.mean()


def generalized_advantages(rollout: Rollout, args: argparse.Namespace) -> Tensor:
    """Return the advantage of each token over its expected return (GAE): [batch, new tokens]."""
    after = torch.cat([rollout.values[:, 1:], torch.zeros_like(rollout.values[:, :1])], dim=1)
    errors = rollout.rewards + args.gamma * after - rollout.values
    advantages = torch.zeros_like(errors)
    advantage = torch.zeros_like(errors[:, 0])
    for column in reversed(range(errors.shape[1])):
        advantage = errors[:, column] + args.gamma * args.lam * advantage
        advantages[:, column] = advantage
    return advantages


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, help="`both` and `policy` are written here")
    add(
        "--model",
        help="folder with config, weights and tokenizer; default: a tiny OLMo-2 from scratch",
    )
    add(
        "--dataset",
        type=Path,
        help="text or JSONL file that prompts are cut from; default: Python's sources",
    )
    add(
        "--target",
        default=" [a-z]+",
        help="regular expression a rewarded token matches (default %(default)r)",
    )
    add(
        "--iterations",
        type=int,
        default=20,
        help="rounds of sampling and learning (default %(default)s)",
    )
    add(
        "--save-every",
        type=int,
        default=0,
        help="iterations between checkpoints, 0 for signals and the end alone",
    )
    add(
        "--batch-size",
        type=int,
        default=32,
        help="prompts per process and iteration (default %(default)s)",
    )
    add("--prompt-length", type=int, default=8, help="tokens (default %(default)s)")
    add(
        "--new-tokens", type=int, default=16, help="sampled after each prompt (default %(default)s)"
    )
    add("--epochs", type=int, default=2, help="passes over each rollout (default %(default)s)")
    add(
        "--minibatches", type=int, default=4, help="optimizer steps in a pass (default %(default)s)"
    )
    add("--learning-rate", type=float, default=3e-3, help="(default %(default)s)")
    add(
        "--clip",
        type=float,
        default=0.2,
        help="largest change of a probability ratio (default %(default)s)",
    )
    add(
        "--kl",
        type=float,
        default=0.005,
        help="penalty per nat away from the reference (default %(default)s)",
    )
    add("--entropy", type=float, default=0.0, help="bonus per nat of entropy (default %(default)s)")
    add("--gamma", type=float, default=1.0, help="discount per token (default %(default)s)")
    add("--lam", type=float, default=0.95, help="lambda of GAE (default %(default)s)")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
