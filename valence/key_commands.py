"""`valence keys ...`: the commands for API keys, thin layers over keys.py; link_commands.py has those for links."""

from pathlib import Path
from typing import Annotated

import typer

from valence.errors import CommandError
from valence.link_commands import links
from valence.options import AsJson, ConfigFile, Settings, load_config, print_listing

KeyName = Annotated[str, typer.Argument(help="Letters, digits, dots, hyphens, underscores.")]
Requests = Annotated[int | None, typer.Option("--requests", min=0, help="Most requests open at once; 0: any.")]
PerMinute = Annotated[int | None, typer.Option("--per-minute", min=0, help="Most requests a minute; 0: any.")]
TokensPerMinute = Annotated[
    int | None, typer.Option("--tokens-per-minute", min=0, help="Most tokens of prompts and answers a minute; 0: any.")
]
Weight = Annotated[
    int | None, typer.Option("--weight", min=1, help="Share of the server, against those of other keys.")
]
Priority = Annotated[int | None, typer.Option("--priority", help="Of requests that name none; smaller is sooner.")]
Soonest = Annotated[int | None, typer.Option("--soonest", help="The smallest priority that a request can have.")]
KeysFile = Annotated[str, typer.Option("--file", help="File of keys; empty: api.keys_file of the settings.")]

keys = typer.Typer(no_args_is_help=True, help="Look after the keys of the API, and of links between hosts.")
keys.add_typer(links, name="links")


@keys.command("add")
def add_key(
    name: KeyName,
    requests: Requests = None,
    per_minute: PerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    weight: Weight = None,
    priority: Priority = None,
    soonest: Soonest = None,
    admin: Annotated[bool, typer.Option("--admin", help="May use administrative routes, too, like /metrics.")] = False,
    file: KeysFile = "",
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Make a key and print it, once. A running server takes it at its next request."""
    from valence.keys import add

    limits = _limits(requests, per_minute, tokens_per_minute, weight, priority, soonest)
    print(add(_keys_file(file, config, settings), name, admin=admin, **limits))


@keys.command("set")
def set_key(
    name: KeyName,
    requests: Requests = None,
    per_minute: PerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    weight: Weight = None,
    priority: Priority = None,
    soonest: Soonest = None,
    file: KeysFile = "",
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Change limits of a key; what is not named stays. A running server follows, and forgets nothing it has counted."""
    from valence.keys import change

    limits = _limits(requests, per_minute, tokens_per_minute, weight, priority, soonest)
    change(_keys_file(file, config, settings), name, **limits)


def _limits(*values: int | None) -> dict[str, int]:
    """Those that were given, by their names as fields of a key."""
    names = ("requests", "per_minute", "tokens_per_minute", "weight", "priority", "soonest")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


@keys.command("list")
def list_keys(as_json: AsJson = False, file: KeysFile = "", config: ConfigFile = "", settings: Settings = None) -> None:
    """Names and limits of the keys; 0 is no limit of requests or tokens."""
    from valence.keys import listed

    print_listing(listed(_keys_file(file, config, settings)), as_json)


@keys.command("remove")
def remove_key(name: KeyName, file: KeysFile = "", config: ConfigFile = "", settings: Settings = None) -> None:
    """Take a key back. A running server refuses it from its next request on."""
    from valence.keys import remove

    remove(_keys_file(file, config, settings), name)


def _keys_file(file: str, config: str, settings: list[str] | None) -> Path:
    path = file or load_config(config, settings or []).api.keys_file
    if not path:
        raise CommandError("no file of keys is named; use --file, or set api.keys_file")
    return Path(path)
