"""Labels of ways and figures on the pages and in the chart."""

import math

_SHARED = {
    "ours": "ft_ckpt",
    "limit: memory copy": "a copy of the state in memory",
    "limit: O_DIRECT write": "the disk: write past the page cache and sync",
    "limit: O_DIRECT read": "the disk: read past the page cache",
    "limit: O_DIRECT read, kept": "the same, kept in new memory",
    "limit: O_DIRECT read, then write": "the disk: read, then write",
    "torch.save": "`torch.save`",
    "save_pretrained": "`save_pretrained`",
    "from_pretrained": "`from_pretrained`",
    "get_state_dict + save_pretrained": "`get_state_dict`, `save_pretrained`",
    "torch DCP + consolidation": "torch DCP, consolidated",
    "torch DCP async": "torch DCP `async_save`",
    "torch DCP async, staged": "torch DCP `async_save`, staged",
    "torchsnapshot async": "torchsnapshot",
}
_SAVES = {
    "ours": "ft_ckpt: safetensors",
    "ours, h5": "ft_ckpt: HDF5",
    "ours, dual": "ft_ckpt: dual",
    "accelerate": "`accelerate.save_state`",
    "safetensors": "`safetensors` `save_file`",
}
_LOADS = {
    "ours": "`ft_ckpt.load_model`",
    "ours, mapped": "`ft_ckpt.load_model(mapped=True)`",
    "ours, load": "`ft_ckpt.load`",
    "ours, load of h5": "`ft_ckpt.load` of HDF5",
    "ours, resume": "`saver.resume` into a live model, digests aside",
    "ours, resume with digests": "`saver.resume`, all digests compared",
    "safetensors": "`safetensors` `load_file`",
    "safetensors, pread": '`safetensors` `load_file(backend="pread")`',
    "safetensors, prefetch": "`safetensors` `prefetch`",
    "torch.load": "`torch.load`",
    "torch.load, mmap": "`torch.load(mmap=True)`",
}
_FIRST = {
    "ours": "`ft_ckpt.load`",
    "ours, h5": "`ft_ckpt.load` of HDF5",
    "safetensors safe_open": "`safetensors` `safe_open`",
    "safetensors load_file": "`safetensors` `load_file`",
    "tensorizer, lazy": "tensorizer, `lazy_load`",
}
_MANY = {"ours": "ft_ckpt: safetensors", "ours, h5": "ft_ckpt: HDF5"}
_RANKS = {
    "ours": "ft_ckpt, every rank writes its bytes",
    "ours, gather": "ft_ckpt, rank 0 gathers (no shared file system)",
}
_LABELS = {
    "save": _SAVES,
    "memory": _SAVES,
    "cold": _LOADS,
    "warm": _LOADS,
    "first": {**_LOADS, **_FIRST},
    "many": _MANY,
    "ranks": _RANKS,
}


def label(measure: str, way: str) -> str:
    """Return the name of a way for readers, as Markdown."""
    return {**_SHARED, **_LABELS.get(measure, {})}.get(way, way.replace("ours", "ft_ckpt"))


def figure_text(figure: str, value: float) -> str:
    """Format a figure with its unit, which is the suffix of its name."""
    if figure.endswith("bytes"):
        power = min(3, (len(str(int(value))) - 1) // 3)
        return f"{value / 1000**power:.{int(power == 3)}f} {('B', 'KB', 'MB', 'GB')[power]}"
    if figure.endswith("seconds"):
        return f"{seconds_text(value)} s"
    return f"{value:.2f}"


def seconds_text(value: float) -> str:
    """Format seconds without their unit: to a hundredth, or two digits of less than a tenth."""
    return f"{value:.{max(2, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
