"""The files of `deploy/`: the tools that read them accept them, and they fit the programs."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from diesel_fs.errors import ConfigError
from diesel_server.main import program as server
from tests.test_house import TREE

DEPLOY = TREE / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
EXPOSURE_MAX = "25"  # tenths of systemd's scale of exposure: 0 (nothing) to 10


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing, and this system has no package of it")
    return found


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def _units_of_this_tree(folder: Path) -> list[Path]:
    """Copy the units, with the programs of this tree's environment in place of the installed
    ones."""
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8")
        assert "/opt/diesel-fs/bin/" in text
        there = text.replace("/opt/diesel-fs/bin", str(Path(sys.executable).parent))
        (folder / unit.name).write_text(there, encoding="utf-8")
    return [folder / unit.name for unit in UNITS]


def test_systemd_accepts_the_units_without_a_warning(tmp_path: Path) -> None:
    program = _program("systemd-analyze")
    done = _run(program, "verify", "--man=no", *map(str, _units_of_this_tree(tmp_path)))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_rates_the_servers_exposure_as_low(tmp_path: Path) -> None:
    program = _program("systemd-analyze")
    server = next(unit for unit in _units_of_this_tree(tmp_path) if "server" in unit.name)
    done = _run(program, "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(server))
    assert done.returncode == 0, done.stdout


def _parsed_compose(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    program = _program("docker-compose")
    copy = folder / "deploy"
    (copy / "secrets").mkdir(parents=True)
    shutil.copy(DEPLOY / "compose.yaml", copy)
    for name in re.findall(r"file: \./(secrets/\w+)", (copy / "compose.yaml").read_text()):
        (copy / name).touch()
    done = _run(program, "-f", str(copy / "compose.yaml"), "config")
    assert done.returncode == 0, done.stderr
    composed: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(done.stdout)
    return composed


def test_the_containers_keep_data_in_volumes_and_listen_on_loopback_only(tmp_path: Path) -> None:
    composed = _parsed_compose(tmp_path)
    assert set(composed["services"]) >= {"redis", "objects", "server1", "server2"}
    for name, service in composed["services"].items():
        assert "volumes" in service or name in ("admin", "bucket"), name
        for port in json.loads(json.dumps(service.get("ports", []))):
            host = port if isinstance(port, str) else port.get("host_ip", "")
            assert host.startswith("127.0.0.1"), f"{name} is open to the world without TLS"


def test_images_of_others_are_pinned_to_a_release(tmp_path: Path) -> None:
    images = {str(each["image"]) for each in _parsed_compose(tmp_path)["services"].values()}
    assert images >= {"diesel-fs"}
    for image in images - {"diesel-fs"}:
        assert re.search(r":(RELEASE\.\d{4}-\d\d-\d\dT|\d+\.\d+\.\d+)", image), image


def test_the_server_knows_every_variable_that_is_set_for_it() -> None:
    known = {f"DIESEL_SERVER_{each.name.upper()}" for each in server.params if each.name}
    for file in (*UNITS, DEPLOY / "compose.yaml", DEPLOY / "README.md"):
        named = set(re.findall(r"DIESEL_SERVER_[A-Z_]+", file.read_text(encoding="utf-8")))
        assert named <= known, file.name
        assert named or "mount" in file.name


def test_with_the_units_options_the_server_misses_only_the_store(tmp_path: Path) -> None:
    """The unit leaves the store to the administrator's own file."""
    text = next(unit for unit in UNITS if "server" in unit.name).read_text(encoding="utf-8")
    lines = re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
    words = [word.partition("=") for line in lines for word in line.split()]
    environment = {name: value.replace("%", str(tmp_path)) for name, _, value in words}
    program = Path(sys.executable).with_name("diesel-server")
    done = subprocess.run(
        [program], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ConfigError.exit_code
    assert "no store is given" in done.stderr


def test_the_image_has_all_packages_and_both_programs() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    project = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))
    roots = {
        next(each for each in (TREE, TREE / "server", TREE / "cli") if (each / name).is_dir())
        for name in ("diesel_fs", "diesel_server", "dlcmd")
    }
    assert roots == {TREE, TREE / "server", TREE / "cli"}
    assert {"diesel_fs", "server", "cli", "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((TREE / name).exists() for name in copied - {"--from=build", "/wheels"})
    started = next(line for line in lines if line.startswith("ENTRYPOINT"))
    assert json.loads(started.removeprefix("ENTRYPOINT"))[0] in project["project"]["scripts"]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert kept == copied - {"--from=build", "/wheels"}
