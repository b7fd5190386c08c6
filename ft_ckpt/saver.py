"""`CheckpointSaver`: the one object a training script talks to."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt import commit, engines
from ft_ckpt.config import SaverConfig, make_config, parse_size
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.parts import Attribute
from ft_ckpt.ranks import attempt, current
from ft_ckpt.saving import Request, SaveReport, check_companions, run

__all__ = ["CheckpointSaver", "SaveReport"]


class CheckpointSaver:
    """Saves models that Accelerate, or nothing, has wrapped, as folders that every Hugging Face tool loads.

    `accelerator` is looked through for prepared models, whose generation configs are checked here and now, so that a
    run does not end on an error that was there at its start. `directory` is where checkpoints go when `save` is given
    a step and no path. `settings` are the fields of `SaverConfig`, which may be passed as `config` instead.

    Raises ConfigError for settings that cannot work, CompanionError for a tokenizer or generation config that does
    not fit, TargetError when `directory` cannot be written.
    """

    def __init__(
        self,
        accelerator: Any = None,
        directory: str | Path | None = None,
        *,
        tokenizer: Any = None,
        config: SaverConfig | None = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(config, settings)
        self.accelerator = accelerator
        self.directory = None if directory is None else Path(directory)
        self.tokenizer = tokenizer
        self._closed = False
        if self.directory is not None:
            commit.check_target(self.directory, 0)
        for model in getattr(accelerator, "_models", None) or ():
            # A template takes its tokens from the tokenizer, which may only come with the call of save().
            check_companions(engines.unwrap(model), tokenizer, self.config.chat_template_name if tokenizer else None)

    def save(
        self,
        model: nn.Module,
        path: str | Path | None = None,
        *,
        adapter_only: bool = False,
        attribute: Attribute = None,
        dtype: str | None = None,
        chat_template_name: str | None = None,
        tokenizer: Any = None,
        format: str | None = None,  # noqa: A002 - the name its users know from other savers
        compression: str | None = None,
        max_shard_size: int | str | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveReport:
        """Save `model`, or what is asked of it, to the folder `path`; call on every rank. Returns when it is durable.

        The whole model by default; its PEFT adapters with `adapter_only`; the submodule at `attribute`, or several, a
        folder each. `path` defaults to `directory`/checkpoint-`step`. `state_dict` is taken instead of the live
        tensors, if it agrees with the model. The other keywords override the saver's settings for this call.

        Raises SelectionError when the model lacks what was asked for, IncompleteError when the result would differ
        from the live model, TargetError or NoSpaceError when it cannot be written, RankError when another rank
        failed, RanksDisagreeError when ranks called differently or not at all. Nothing is committed then, and what
        was committed before is whole.
        """
        begun = time.monotonic()
        given: dict[str, Any] = {
            "dtype": dtype,
            "chat_template_name": chat_template_name,
            "format": format,
            "compression": compression,
            "max_shard_size": max_shard_size,
        }
        config = replace(self.config, **{name: value for name, value in given.items() if value is not None})
        ranks = current(config.enter_timeout_seconds)
        request, error = attempt(
            lambda: Request(
                model=model,
                target=self._target(path, step),
                adapter_only=adapter_only,
                attribute=attribute,
                dtype=config.dtype,
                chat_template_name=config.chat_template_name,
                tokenizer=self.tokenizer if tokenizer is None else tokenizer,
                format=config.format,
                max_shard_bytes=parse_size(config.max_shard_size),
                state_dict=state_dict,
                state_dict_given=state_dict is not None,
                step=step,
                metrics=dict(metrics or {}),
            )
        )
        return run(request, error, ranks, config, begun)

    def close(self) -> None:
        """End of use: later saves are refused. Also called when a `with` block ends."""
        self._closed = True

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _target(self, path: str | Path | None, step: int | None) -> Path:
        if self._closed:
            raise CheckpointError("this saver is closed; make a new one to save again")
        if path is not None:
            return Path(path).absolute()
        if self.directory is None or step is None:
            raise ConfigError("save() without a path needs the saver's directory and a step; give it a path, or both")
        return (self.directory / self.config.name_template.format(step=step)).absolute()
