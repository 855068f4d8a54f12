"""What several files of commands share: options, the settings that a command sees, and how lists are printed."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common import env

if TYPE_CHECKING:
    from common.config import Config

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="One setting; may be repeated.")]
ConfigFile = Annotated[str, typer.Option("--config", help="TOML file of settings.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def load_config(config: str, settings: list[str]) -> "Config":
    """From the file (empty: the environment's), the environment's settings, and these. Raises ConfigError."""
    from common import config as configuration

    env.check()
    return configuration.load(config or env.config_path(), env.settings() + settings)


def print_listing(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console

    from valence.display import listing_table

    Console().print(listing_table(rows))
