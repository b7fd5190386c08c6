"""The curves that `ft-ckpt` draws; matplotlib is imported here, when there is something to draw."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ft_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")
_SPREAD = 20  # the curve reaches from the optimum divided by this to the optimum times this
_POINTS = 200


def new_figure(inches: tuple[float, float]) -> "Figure":
    """An empty figure of that width and height. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("drawing needs matplotlib; run `pip install 'ft_ckpt[plot]'`") from error
    return Figure(figsize=inches, layout="constrained")


def draw_costs(
    path: Path, best_steps: int, step_seconds: float, saving: Callable[[float], float], total: Callable[[float], float]
) -> None:
    """Draw overhead against steps between saves into `path`: `saving`, recomputation, and their `total`.

    Both functions take steps and return fractions. Raises ConfigError for another suffix than .png, .svg or .pdf,
    or without matplotlib.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: expected a file name that ends in {', '.join(_SUFFIXES)}")
    figure = new_figure((8, 5))
    first = max(1.0, best_steps / _SPREAD)
    steps = [first * (best_steps * _SPREAD / first) ** (point / _POINTS) for point in range(_POINTS + 1)]
    axes = figure.subplots()
    axes.plot(steps, [100 * total(each) for each in steps], label="total", linewidth=2)
    axes.plot(steps, [100 * saving(each) for each in steps], label="saving", linestyle="--")
    axes.plot(steps, [100 * (total(each) - saving(each)) for each in steps], label="recomputation", linestyle=":")
    best = 100 * total(best_steps)
    axes.plot([best_steps], [best], "o", color="black", label=f"optimum: {best_steps} steps, {best:.2f} %")
    axes.set(xscale="log", xlabel="steps between saves", ylabel="overhead, % of the time", ylim=(0, 4 * best))
    axes.set_title(f"What saving and failing cost, steps of {step_seconds:.3g} s")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
