"""The files of docs/examples can be read, agree with each other, and give flags that `loong serve` takes."""

import configparser
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loong.launcher.cli import build_parser
from loong.launcher.config_file import apply_config_file
from loong.server.api.middleware import OPEN_PATHS

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
CONFIG = FOLDER / "serve.yaml"
PLACE = "/etc/loong/serve.yaml"  # of the config, where the server runs


def flags_of(words: list[str], config: Path = CONFIG) -> dict[str, Any]:
    """Return the flags that `loong serve` reads from these words, with the config of the example."""
    words = ["serve", *(str(config) if word == PLACE else word for word in words)]
    parser, commands = build_parser(["serve"])
    apply_config_file(commands["serve"], words)
    return vars(parser.parse_args(words))


@pytest.fixture(scope="module")
def service() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as configparser documents it
    parser.read_string((FOLDER / "loong.service").read_text())
    return parser


@pytest.fixture(scope="module")
def container() -> dict[str, str]:
    """Return the last argument of each instruction of the container file."""
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {instruction: argument.strip() for instruction, _, argument in lines}


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, Any]]:
    found = map(msgspec.yaml.decode, (FOLDER / "kubernetes.yaml").read_text().split("\n---\n"))
    return {resource["kind"]: resource for resource in found}


def test_the_config_is_one_of_loong_serve() -> None:
    flags = flags_of(["--config", PLACE])
    assert flags["num_instances"] == 2
    assert Path(flags["api_key_file"]).parent == Path(PLACE).parent


def sources_of(volume: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the config and of the keys that a volume has, which only the group reads."""
    projected = volume["projected"]
    assert projected["defaultMode"] == 0o440
    config, keys = projected["sources"]
    return config["configMap"]["name"], keys["secret"]["name"]


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_example_has_a_key(path: Path) -> None:
    """A key that many know is none. Whoever applies an example makes one, without which nothing starts."""
    text = path.read_text()
    assert not re.findall(r"(?m)--(?:api|admin)-key[ =]|^\s*(?:api|admin)-key:|KEY=(?!\$\()|stringData", text)


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kuberay.yaml"])
def test_the_commands_make_the_secret_that_the_server_reads(name: str) -> None:
    text = (FOLDER / name).read_text()
    ((secret, file),) = re.findall(r"create secret generic (\S+) --from-literal=(\S+)=\"\$\(openssl", text)
    assert f"secret: {{name: {secret}}}" in text
    assert f"api-key-file: {Path(PLACE).parent / file}" in text


def test_systemd_starts_a_server_and_waits_for_its_drain(service: configparser.ConfigParser) -> None:
    command, name, *words = service["Service"]["ExecStart"].split()
    assert (Path(command).name, name) == ("loong", "serve")
    assert service["Service"].getint("TimeoutStopSec") > flags_of(words)["drain_timeout"]
    assert service["Service"]["Restart"] == "on-failure"
    assert set(service.sections()) == {"Unit", "Service", "Install"}


def test_a_container_listens_beyond_the_loopback_on_the_port_that_it_exposes(
    container: dict[str, str],
) -> None:
    command, name, *words = json.loads(container["ENTRYPOINT"])
    flags = flags_of(words)
    assert (command, name, flags["host"]) == ("loong", "serve", "0.0.0.0")
    assert int(container["EXPOSE"]) == flags["port"]
    assert re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", container["HEALTHCHECK"]) == [
        (str(flags["port"]), "/health")
    ]


def test_kubernetes_runs_that_container_with_the_same_config(
    resources: dict[str, dict[str, Any]], container: dict[str, str], tmp_path: Path
) -> None:
    template = resources["Deployment"]["spec"]["template"]
    (server,) = template["spec"]["containers"]
    config = tmp_path / "serve.yaml"
    config.write_text(resources["ConfigMap"]["data"][Path(PLACE).name])
    assert msgspec.yaml.decode(config.read_text()) == msgspec.yaml.decode(CONFIG.read_text())
    _, _, *words = json.loads(container["ENTRYPOINT"])
    flags = flags_of([*words, *server["args"]], config)
    assert [port["containerPort"] for port in server["ports"]] == [flags["port"]]
    assert template["spec"]["terminationGracePeriodSeconds"] > flags["drain_timeout"]


def test_kubernetes_names_only_what_there_is(resources: dict[str, dict[str, Any]]) -> None:
    deployment, service = resources["Deployment"]["spec"], resources["Service"]["spec"]
    template = deployment["template"]
    (server,) = template["spec"]["containers"]
    assert deployment["selector"]["matchLabels"] == template["metadata"]["labels"] == service["selector"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == volumes.keys()
    assert sources_of(volumes["config"])[0] == resources["ConfigMap"]["metadata"]["name"]
    ports = {port["name"] for port in server["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports


def test_the_ray_cluster_has_two_hosts_with_one_token() -> None:
    cluster = msgspec.yaml.decode((FOLDER / "ray-cluster.yaml").read_text())
    provider = cluster["provider"]
    hosts = [provider["head_ip"], *provider["worker_ips"]]
    assert len(set(hosts)) == 2
    assert cluster["min_workers"] == cluster["max_workers"] == len(provider["worker_ips"])
    starts = [cluster[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert all(command.startswith("RAY_AUTH_MODE=token ray start ") for command in starts)
    assert f"--node-ip-address={provider['head_ip']}" in starts[0]
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    page = (FOLDER.parent / "hosts.md").read_text()
    (submitted,) = re.findall(r"ray job submit .*? -- \\\n\s+loong (serve (?:.*\\\n)?.*)", page)
    parser, _ = build_parser(["serve"])
    flags = parser.parse_args(submitted.replace("\\\n", " ").split())
    assert (flags.hosts, flags.num_hosts) == ("ray", len(hosts))


def test_kuberay_runs_one_server_over_the_gpus_of_all_its_hosts(tmp_path: Path) -> None:
    text = (FOLDER / "kuberay.yaml").read_text()
    found = {each["kind"]: each for each in map(msgspec.yaml.decode, text.split("\n---\n"))}
    config, job = tmp_path / "serve.yaml", found["RayJob"]["spec"]
    config.write_text(found["ConfigMap"]["data"][Path(PLACE).name])
    command, name, *words = job["entrypoint"].split()
    flags, cluster = flags_of(words, config), job["rayClusterSpec"]
    head, (group,) = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"]
    pods = [head["spec"], *[group["template"]["spec"]] * group["replicas"]]
    servers = [container for pod in pods for container in pod["containers"]]
    assert (command, name, flags["hosts"], flags["num_hosts"]) == ("loong", "serve", "ray", len(servers))
    num_gpus = sum(server["resources"]["limits"]["nvidia.com/gpu"] for server in servers)
    assert (flags["device"], flags["num_instances"]) == ("cuda", num_gpus)
    assert cluster["authOptions"] == {"mode": "token"}
    assert len({server["image"] for server in servers}) == 1
    for pod in pods:
        mounts = {mount["name"] for server in pod["containers"] for mount in server["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert sources_of(head["spec"]["volumes"][0])[0] == found["ConfigMap"]["metadata"]["name"]
    assert found["Service"]["spec"]["selector"] == head["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in servers[0]["ports"]}
    assert (ports["http"], flags["host"]) == (flags["port"], "0.0.0.0")
    assert ports["dashboard"] == 8265, "the operator submits the job there"
    assert {"port": flags["port"]} in found["NetworkPolicy"]["spec"]["ingress"][-1]["ports"]


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_need_no_key_and_liveness_bears_lost_instances(
    resources: dict[str, dict[str, Any]], name: str
) -> None:
    (server,) = resources["Deployment"]["spec"]["template"]["spec"]["containers"]
    probe = server[name]
    assert probe["httpGet"]["path"] in OPEN_PATHS
    assert probe["httpGet"]["port"] in {port["name"] for port in server["ports"]}
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience >= {"startupProbe": 600, "readinessProbe": 0, "livenessProbe": 60}[name]
