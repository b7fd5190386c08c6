"""The objects of a run: those that Accelerate has prepared, and those registered by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ft_ckpt.errors import ConfigError
from ft_ckpt.model.parts import check_model
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap
from ft_ckpt.runs.items.objects import (
    Item,
    OptimizerItem,
    main_model,
    optimizers_among,
    plain_optimizers,
    refuse_unsaveable,
    run_items,
)
from ft_ckpt.runs.items.signatures import Signatures, items_in_saved_order, object_signatures
from ft_ckpt.runs.items.tensors import Key, walk_run
from ft_ckpt.runs.items.watched_models import (
    WatchedModel,
    changed_models,
    differing_models,
    watch_model,
    watched_digests,
)
from ft_ckpt.runs.optimizers import is_schedule_free_in_training


class RunObjects:
    """The objects of a run.

    A script may prepare more objects at any time, so each call lists them again.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self.accelerator = accelerator
        self.registered: dict[str, Any] = {}
        self.watched: dict[str, WatchedModel] = {}

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add objects by name. The object "model" is the main model, whose weights are saved.

        An object replaces an earlier one with the same name. Raises SelectionError for an object
        whose state cannot be saved. Raises ConfigError for a name that Accelerate's objects or
        ft_ckpt use.
        """
        if "model" in objects:
            check_model(objects["model"])
        items = run_items(self.accelerator, {**self.registered, **objects})
        refuse_unsaveable(item for item in items if item.name in objects)
        self.registered.update(objects)

    def watch(self, name: str, model: nn.Module) -> None:
        """Track a model that the script rebuilds at each start.

        The script must register the model once its values have changed. Raises as
        `ModelTensors.sources` for tensors that cannot be stored.
        """
        self.watched[name] = watch_model(model)

    def take_changed(self, ranks: Ranks) -> dict[str, nn.Module]:
        """Stop watching the models whose values have changed, and return them.

        Collective: call it on every rank.
        """
        names = changed_models(self.watched, ranks)
        return {name: self.watched.pop(name).model for name in names}

    def watched_digests(self) -> dict[str, str]:
        """Return the digests of the watched models, for the state of the run."""
        return watched_digests(self.watched)

    def differing_models(self, saved: Mapping[str, str]) -> list[str]:
        """Return a sentence for each watched model with other values than in a saved run.

        `saved` is the result of `watched_digests` in that run.
        """
        return differing_models(self.watched, saved)

    def items(self) -> list[Item]:
        """Return all objects except for the main model. Raises as `run_items` does."""
        return run_items(self.accelerator, self.registered)

    def items_in_saved_order(self, saved: Signatures) -> list[Item]:
        """Return the items with the names that the objects had in the saved run.

        Objects are recognized by their signatures. Raises LoadError if the main model is another
        one than before.
        """
        return items_in_saved_order(self.accelerator, self.registered, saved)

    def signatures(self, sources: Mapping[Key, Source]) -> Signatures:
        """Return the signatures of unnamed prepared objects, by the names of their items.

        `sources` are the tensors of the run's models. Raises ConfigError if two objects have the
        same signature.
        """
        return object_signatures(self.accelerator, self.registered, lambda: sources)

    @property
    def main_model(self) -> nn.Module | None:
        """The model whose weights are saved; None before one is prepared or registered."""
        return main_model(self.accelerator, self.registered)

    @property
    def model(self) -> nn.Module:
        """The model whose weights are saved. Raises ConfigError when there is none."""
        model = self.main_model
        if model is None:
            raise ConfigError(
                "no model: prepare one with Accelerate before this, or pass it: "
                "saver.register(model=model, ...)"
            )
        return model

    @property
    def has_model(self) -> bool:
        """Whether a model was prepared, or registered as "model"."""
        return "model" in self.registered or bool(getattr(self.accelerator, "_models", None))

    def models(self) -> dict[str, nn.Module]:
        """Return the models by the names of their items; "" is the main model."""
        models: dict[str, nn.Module] = {"": self.model}
        for item in self.items():
            if item.kind == "model":
                models[item.name] = item.value
        return models

    def refuse_unsaveable(self) -> None:
        """Raise SelectionError naming all optimizers whose state can never be saved."""
        refuse_unsaveable(self.items())

    def optimizers(self) -> list[OptimizerItem]:
        return optimizers_among(self.items())

    def plain_optimizers(self) -> list[Any]:
        """Return the optimizers whose steps use the gradients of the models' own parameters."""
        return plain_optimizers(self.items())

    def steppers(self) -> dict[Optimizer, list[Tensor]]:
        """Return the optimizers that call hooks before they step.

        The value of each has the tensors that its steps change besides its parameters and state.
        """
        hooked_optimizers: dict[Optimizer, list[Tensor]] = {}
        for item in self.optimizers():
            inner, other_tensors = item.kind.hooked_optimizer(item.optimizer)
            if isinstance(inner, Optimizer) and getattr(type(inner).step, "hooked", False):
                hooked_optimizers[inner] = other_tensors
        return hooked_optimizers

    def walk(self) -> tuple[list[Item], dict[Key, Source]]:
        """Return the items with the extra state of the models, and the tensors of the models."""
        items, _, sources = walk_run(self.model, self.items())
        return items, sources

    def notes_on_weights(self, model: nn.Module) -> list[str]:
        """Return a sentence for the report if the weights of `model` are not those to use.

        Schedule-free optimizers train other weights than those that they are evaluated by.
        """
        model_ids = {id(parameter) for parameter in unwrap(model).parameters()}
        notes: list[str] = []
        for optimizer in self.plain_optimizers():
            optimizer_ids: set[int] = set()
            for group in optimizer.param_groups:
                optimizer_ids.update(id(parameter) for parameter in group["params"])
            if model_ids & optimizer_ids and is_schedule_free_in_training(optimizer):
                notes.append(
                    f"{type(optimizer).__name__} is in train mode: the weights are the point of "
                    "training, not the average that it is evaluated by; call optimizer.eval() "
                    "before a save of weights to use"
                )
        return notes

    def notes_on_averages(self) -> list[str]:
        """Return a sentence for the report if the run keeps an average of the weights.

        It says which weights the folder of the checkpoint has.
        """
        notes = []
        for name, model in self.models().items():
            if isinstance(model, AveragedModel) and name:
                notes.append(
                    f"{name}: an average of the weights, kept with the training state; the folder "
                    "has the weights of training"
                )
        return notes
