"""The compose files as data: read, merged and interpolated as Compose does, and checked key by key.

Only the keys that these files use are known, all of which every Compose since 1.29 understands; any other
one is an error, so a misspelt key or one of a newer Compose does not pass as a comment.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "compose.yaml"
CPU, NVIDIA, TCP = (ROOT / f"deploy/compose.{name}.yaml" for name in ("cpu", "nvidia", "tcp"))
KEYED_BY_TARGET = ("volumes", "devices")  # lists in which a later file replaces what has the same path in the container
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?::-(?P<default>[^}]*))?\}")

Size = Annotated[str, Meta(pattern=r"^\d+(m|g|mb|gb)$")]
Seconds = Annotated[str, Meta(pattern=r"^\d+[sm]$")]


class Strict(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A mapping with these keys and no others."""


class Build(Strict, frozen=True):
    context: str
    dockerfile: str
    target: str
    args: dict[str, str] = {}


class HealthCheck(Strict, frozen=True):
    test: list[str] = []
    interval: Seconds = "30s"
    timeout: Seconds = "30s"
    retries: int = 3
    start_period: Seconds = "0s"
    disable: bool = False


class Limit(Strict, frozen=True):
    soft: Annotated[str, Meta(pattern=r"^-?\d+$")]
    hard: Annotated[str, Meta(pattern=r"^-?\d+$")]


class Ulimits(Strict, frozen=True):
    nofile: Limit
    memlock: Limit | None = None


class Logging(Strict, frozen=True):
    driver: Literal["json-file"]
    options: dict[str, str]


class Dependency(Strict, frozen=True):
    condition: Literal["service_started", "service_healthy"]


class Reservation(Strict, frozen=True):
    driver: str
    count: Literal["all"] | int
    capabilities: list[str]


class Reservations(Strict, frozen=True):
    devices: list[Reservation]


class Resources(Strict, frozen=True):
    reservations: Reservations


class Deploy(Strict, frozen=True):
    replicas: Annotated[str, Meta(pattern=r"^\d+$")] = "1"
    resources: Resources | None = None


class SecretFile(Strict, frozen=True):
    source: str
    target: str


class Service(Strict, frozen=True):
    image: str
    build: Build
    command: list[str]
    user: str
    init: bool
    restart: Literal["unless-stopped", "no"]
    stop_grace_period: Seconds
    read_only: bool
    cap_drop: list[str]
    security_opt: list[str]
    environment: dict[str, str]
    healthcheck: HealthCheck
    ulimits: Ulimits
    logging: Logging
    tmpfs: list[str]
    volumes: list[Annotated[str, Meta(pattern=r"^[^:]+:/[^:]+(:ro)?$")]]
    network_mode: Literal["none", "host"] | None = None
    ports: list[str] = []
    depends_on: dict[str, Dependency] = {}
    secrets: list[str | SecretFile] = []
    devices: list[Annotated[str, Meta(pattern=r"^/[^:]+:/[^:]+$")]] = []
    group_add: list[Annotated[str, Meta(pattern=r"^\d+$")]] = []
    cap_add: list[str] = []
    shm_size: Size = "64mb"
    mem_limit: Size | None = None
    pids_limit: int | None = None
    deploy: Deploy = Deploy()
    profiles: list[str] = []


class Volume(Strict, frozen=True):
    driver: str = "local"
    driver_opts: dict[str, str] = {}


class Secret(Strict, frozen=True):
    file: str


class Application(Strict, frozen=True):
    services: dict[str, Service]
    volumes: dict[str, Volume | None]
    secrets: dict[str, Secret]


def load(*files: Path, environment: Mapping[str, str] | None = None) -> Application:
    """The whole application. Raises msgspec.ValidationError for what Compose, or we, do not know."""
    tree: dict[str, Any] = {}
    for file in files or (BASE,):
        tree = merge(tree, yaml.safe_load(file.read_text()))
    return convert(tree, environment or {})


def convert(tree: dict[str, Any], environment: Mapping[str, str]) -> Application:
    known = {key: value for key, value in tree.items() if not key.startswith("x-")}
    return msgspec.convert(interpolate(known, environment), Application)


def merge(older: Any, newer: Any, key: str = "") -> Any:
    """A later file over an earlier one: mappings by key, lists one after the other, else the newer value."""
    if isinstance(older, dict) and isinstance(newer, dict):
        return older | {name: merge(older.get(name), value, name) for name, value in newer.items()}
    if isinstance(older, list) and isinstance(newer, list) and key != "command":
        kept = older
        if key in KEYED_BY_TARGET:
            replaced = {target(entry) for entry in newer}
            kept = [entry for entry in older if target(entry) not in replaced]
        return kept + newer
    return newer


def target(entry: str) -> str:
    """The path in the container of `source:target[:mode]`, where the source may be a variable."""
    return VARIABLE.sub("variable", entry).split(":")[1]


def interpolate(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: interpolate(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolate(each, environment) for each in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: environment.get(found["name"]) or found["default"] or "", value)
    return value


def variables(*files: Path) -> set[str]:
    return {found["name"] for file in files for found in VARIABLE.finditer(file.read_text())}


def seconds(text: str) -> int:
    return int(text[:-1]) * (60 if text.endswith("m") else 1)
