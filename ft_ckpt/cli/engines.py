"""The commands `publish`, `export` and `check-for`."""

import dataclasses
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.files import print_conversion, refuse_existing
from ft_ckpt.cli.options import add_force, add_json, bounded, one_of, print_lines
from ft_ckpt.cli.show import followed_run
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.places import shown_location

if TYPE_CHECKING:
    from ft_ckpt.extensions.rl.publishing import PublishReport

_ENGINES = ("vllm", "sglang")


def add_publish(parser: ArgumentParser) -> None:
    parser.description = (
        "Load CHECKPOINT into running vLLM or SGLang servers, and check that they serve it. If one "
        "fails, all keep the previous version. With --follow, each new checkpoint of a run is "
        "published. With --delta, the checkpoint is appended to a chain of deltas, from which "
        "other machines rebuild it."
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="Checkpoint: a path or URL; with --follow, a run."
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="+",
        help=(
            "Address of a server, as in http://127.0.0.1:8000; with --delta, the folder or URL "
            "of a chain of deltas."
        ),
    )
    _add_server_options(parser)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="Publish each new checkpoint of a run until SIGINT or SIGTERM.",
    )
    parser.add_argument(
        "--idle",
        type=bounded(float, 0),
        metavar="SECONDS",
        help="With --follow: end after this time without a new checkpoint.",
    )
    add_json(parser)
    parser.set_defaults(run=_publish)


def _add_server_options(parser: ArgumentParser) -> None:
    """Declare the fields of `ServerOptions` by their names.

    Fields without a value keep their defaults.
    """

    def add(flag: str, **declaration: Any) -> None:
        parser.add_argument(flag, default=SUPPRESS, **declaration)

    add("--name", help="Name of the adapter on the servers (default: that of the run's folder).")
    add("--version", help="Name of the version (default: from step and manifest).")
    add(
        "--as",
        **_choice_of("auto", "adapter", "weights"),
        dest="kind",
        help="What to publish (default: auto).",
    )
    add("--part", metavar="NAME", help="Part of the checkpoint to publish.")
    add(
        "--visible-at",
        action="append",
        metavar="LOCAL=SERVER",
        help="The servers see the folder LOCAL at the path SERVER; may be repeated.",
    )
    add(
        "--stage",
        metavar="FOLDER",
        help="Folder that the servers see, for a checkpoint in a bucket.",
    )
    add(
        "--keep",
        type=bounded(int, 0),
        metavar="N",
        help="Number of older versions of an adapter to keep loaded (default: 2).",
    )
    add(
        "--in-flight",
        **_choice_of("wait", "keep", "abort"),
        help="What happens to running requests while weights are replaced (default: wait).",
    )
    add(
        "--check",
        **_choice_of("all", "listed"),
        help=(
            "all: compare digests and answers; listed: only ask whether it is loaded (default: "
            "all)."
        ),
    )
    add(
        "--base",
        help="Base of the adapter: also compare the answers with those of transformers and PEFT.",
    )
    add(
        "--header",
        action="append",
        metavar="NAME=VALUE",
        dest="headers",
        help="Header of each request. For a bearer token, set FT_CKPT_ENGINE_TOKEN instead.",
    )
    add(
        "--timeout",
        type=bounded(float, 0.1),
        metavar="SECONDS",
        dest="timeout_seconds",
        help="Timeout of a request (default: 300).",
    )
    add("--delta", action="store_true", help="Append the changed elements to a chain of deltas.")
    add(
        "--anchor-every",
        type=bounded(int, 1),
        metavar="N",
        help="With --delta: write all elements in every Nth entry (default: 10).",
    )


def _choice_of(*choices: str) -> dict[str, Any]:
    """Return the declaration of an argument that is one of `choices`."""
    return {"type": one_of(*choices), "metavar": "|".join(choices)}


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in pairs:
            # without the text: it may be a token
            raise ConfigError(f"{option}: expected NAME=VALUE, each name once")
        pairs[name] = value
    return pairs


def _publish(options: Namespace) -> None:
    from ft_ckpt.extensions.rl.engines import ServerOptions, ServerSettings
    from ft_ckpt.extensions.rl.publishing import follow_run, publish

    names = vars(options).keys() & ServerSettings.__annotations__
    settings = {name: getattr(options, name) for name in names}
    for name, flag in (("visible_at", "--visible-at"), ("headers", "--header")):
        if name in settings:
            settings[name] = _pairs(flag, settings[name])

    server_options = ServerOptions(url=options.url, **settings)
    if not options.follow:
        _print_report(publish(options.checkpoint, server_options), as_json=options.as_json)
        return

    follow_run(
        followed_run(options.checkpoint),
        server_options,
        idle_seconds=options.idle,
        on_published=lambda report: _print_report(report, as_json=options.as_json),
        on_trouble=_print_trouble,
    )


def _print_trouble(text: str) -> None:
    print_lines(f"ft-ckpt: {text}", file=sys.stderr)


def _print_report(report: "PublishReport", *, as_json: bool) -> None:
    if as_json:
        output.print_json({**dataclasses.asdict(report), "path": str(report.path)})
    elif report.kind in ("anchor", "delta"):
        entry = report.servers[0]
        kind = report.kind if entry.before is None else f"{report.kind} on {entry.before}"
        done = f"{report.seconds:.1f} s" if entry.is_new else "there already"
        print_lines(
            f"{shown_location(report.path)} -> {entry.url}: {kind}, {entry.checked}, {done}"
        )
    else:
        print_lines(
            f"{shown_location(report.path)} -> {report.name} ({report.kind} {report.version}): "
            f"{report.seconds:.1f} s"
        )
        rows = []
        for server in report.servers:
            checked = server.checked if server.is_new else f"there already; {server.checked}"
            paused = f"{server.paused_seconds:.1f} s"
            rows.append((server.url, server.engine, server.before or "-", checked, paused))
        output.print_table(("server", "engine", "before", "checked", "paused"), rows)

    sys.stdout.flush()  # at once, with --follow


def add_export(parser: ArgumentParser) -> None:
    parser.description = (
        "Write ADAPTER to the folder OUT in the form that every version of the engine reads. It "
        "has one rank and one scale."
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="Adapter, or a checkpoint with one.")
    parser.add_argument("target", metavar="OUT", help="Folder to write to.")
    parser.add_argument(
        "--for",
        type=one_of(*_ENGINES),
        metavar="|".join(_ENGINES),
        required=True,
        dest="engine",
        help="Engine that will load the adapter.",
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=_export)


def _export(options: Namespace) -> None:
    refuse_existing(options.target, options.force)
    from ft_ckpt.extensions.rl.limits import export

    report = export(options.adapter, options.target, options.engine, overwrite=options.force)
    print_conversion(options.adapter, report, True, as_json=options.as_json)


def add_check_for(parser: ArgumentParser) -> None:
    parser.description = (
        "List what ENGINE would refuse, ignore or misread in FOLDER. No server is needed. The exit "
        "code is 1 if there is anything."
    )
    parser.add_argument("engine", metavar="ENGINE", type=one_of(*_ENGINES), help="vllm or sglang.")
    parser.add_argument("folder", metavar="FOLDER", help="Adapter or model: a path or URL.")
    parser.add_argument(
        "--max-lora-rank",
        type=bounded(int, 1),
        default=16,
        metavar="N",
        help="Value of --max-lora-rank of the server (default: 16).",
    )
    add_json(parser)
    parser.set_defaults(run=_check_for)


def _check_for(options: Namespace) -> int:
    from ft_ckpt.extensions.rl.limits import check_for

    findings = check_for(options.engine, options.folder, max_lora_rank=options.max_lora_rank)
    if options.as_json:
        result: dict[str, Any] = {
            "path": options.folder,
            "engine": options.engine,
            "findings": findings,
        }
        output.print_json(result)
    elif findings:
        print_lines(*findings)
    else:
        print_lines(
            f"{options.folder}: nothing that {options.engine} would refuse, drop or misread"
        )

    return 1 if findings else 0
