"""`valence keys links ...`: the commands for the keys of tcp links. Each is a thin layer over link_keys.py."""

import json
from pathlib import Path
from typing import Annotated

import typer

links = typer.Typer(no_args_is_help=True, help="Look after the keys of tcp links between processes.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the keys, as links.keys_dir names it.")]
Host = Annotated[str, typer.Option("--host", help="Name for this host's key; empty: its host name.")]


@links.command("init")
def init(folder: Folder, host: Host = "") -> None:
    """Make the keys of a deployment: one pair for all inboxes, one client pair, the list of allowed clients."""
    from valence import link_keys

    link_keys.init(folder, host or link_keys.this_host())
    _show(folder, as_json=False)
    print(f"now set links.keys_dir = {json.dumps(str(folder.absolute()))}; copy the folder to hosts that share its key")


@links.command("show")
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show fingerprints of the keys. Secrets are never shown."""
    _show(folder, as_json)


@links.command("add")
def add(
    folder: Folder,
    host: Annotated[str, typer.Argument(help="Name of the host; letters, digits, dots, hyphens, underscores.")],
    out: Annotated[Path, typer.Option("--out", help="New folder; move it to the host, over a safe way.")],
) -> None:
    """Make a client key for another host, and allow it. Other hosts need the new `clients` file, too."""
    from valence import link_keys

    link_keys.add(folder, host, out)
    print(f"move {out} to {host} and set links.keys_dir there; give every other host the new {folder / 'clients'}")


@links.command("remove")
def remove(folder: Folder, host: Annotated[str, typer.Argument(help="Name of the host, as `show` prints it.")]) -> None:
    """Take a host's key back. New links are refused at once; `valence restart all` also ends those it has."""
    from valence import link_keys

    link_keys.remove(folder, host)
    print(f"give every other host the new {folder / 'clients'}")


@links.command("rotate")
def rotate(folder: Folder, host: Host = "") -> None:
    """Replace all keys; stop the system before, start it afterwards, and add other hosts again."""
    from valence import link_keys

    link_keys.rotate(folder, host or link_keys.this_host())
    _show(folder, as_json=False)


def _show(folder: Path, as_json: bool) -> None:
    from valence import link_keys

    rows = link_keys.listed(folder)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(row["host"]) for row in rows)
    for row in rows:
        print(f"{row['fingerprint']}  {row['host']:{width}}  {row['key']}")
