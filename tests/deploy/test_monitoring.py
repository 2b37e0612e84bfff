"""Dashboards and alerts of `deploy/monitoring`, tested with a real Prometheus that watches a real
server and a real mount.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from diesel_fs import metrics
from diesel_fs.client.dataset import connect
from diesel_fs.mounts.statistics import mount_metrics
from tests.cli.conftest import Dlcmd, program_environment
from tests.cli.conftest import dlcmd as dlcmd
from tests.server.program import Server, new_repository
from tests.storage.metadata.redis_servers import free_port
from tests.test_house import TREE
from tests.waiting import wait_until

MONITORING = TREE / "deploy/monitoring"
DASHBOARDS = sorted(MONITORING.glob("grafana-*.json"))
ALERTS = MONITORING / "alerts.yaml"

READER = """
import os, sys, time
import numpy as np
from diesel_fs.mounts.plans.control import Control, explicit
with Control.connect(sys.argv[1]) as control:
    files = [index for index in range(1, control.hello["entries"])]
    control.announce("rank0", [explicit(epoch=0, entries=np.array(files))])
    for number, name in enumerate(sorted(os.listdir(sys.argv[1]))):
        open(os.path.join(sys.argv[1], name), "rb").read()
        control.progress("rank0", number)
        time.sleep(0.2)
"""


def queries(dashboard: Path) -> list[str]:
    found = json.loads(dashboard.read_text())
    texts = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    for variable in found["templating"]["list"]:
        if variable["type"] == "query":
            [name] = re.findall(r"label_values\((\w+), instance\)", variable["definition"])
            texts.append(name)
    return [text.replace("$__rate_interval", "10s").replace("$instance", ".*") for text in texts]


def get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310  # it is http
        return bytes(answer.read())


@contextmanager
def prometheus(folder: Path, addresses: dict[str, str]) -> Iterator[Callable[[str], list[object]]]:
    """A Prometheus with the configuration of the tree, for a server and a mount of this machine.
    Returns a function that gets the series of a query."""
    found = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    for job in found["scrape_configs"]:
        job["static_configs"] = [{"targets": [addresses.pop(job["job_name"])]}]
    assert not addresses, "a job of each kind"
    found["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    shutil.copy(ALERTS, folder)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(found))
    address = f"127.0.0.1:{free_port()}"
    options = ("--config.file=prometheus.yaml", "--storage.tsdb.path=data")
    command = ["prometheus", *options, f"--web.listen-address={address}"]

    def ask(query: str) -> list[object]:
        words = urllib.parse.urlencode({"query": query})
        try:
            found = json.loads(get(f"http://{address}/api/v1/query?{words}"))
        except OSError:  # Prometheus has not begun
            return []
        result = found["data"]["result"]
        assert isinstance(result, list)
        return result

    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield ask
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def reading(at: Path) -> Iterator[None]:
    program = subprocess.Popen(
        [sys.executable, "-c", READER, str(at)], env={**program_environment(), "RANK": "0"}
    )
    try:
        yield
        assert program.poll() is None, "it reads to the end of the test"
    finally:
        program.kill()
        program.wait()


@pytest.mark.deep
@pytest.mark.fuse
def test_each_query_of_the_dashboards_and_alerts_has_series(dlcmd: Dlcmd, tmp_path: Path) -> None:
    url = (tmp_path / "served").as_uri()
    root = new_repository(url)["root"]
    at = tmp_path / "mount"
    with Server(tmp_path / "server", "--store", url, "--metrics=127.0.0.1:0") as server:
        with connect("pets", server.url, "root", root.key_text, create=True) as dataset:
            dataset.put(b"x" * 1000, "a")
        with connect("pets", os.environ["DIESEL_URL"], create=True) as dataset:
            for number in range(300):
                dataset.put(b"y" * 10_000, f"{number:03}")
        dlcmd("mount", "--metrics=0", "--task=night", "--rank=0", "--world=1", "pets", at)
        try:
            place = str(dlcmd("--json", "stats", at).objects[0]["metrics"])
            addresses = {
                "diesel-server": f"127.0.0.1:{server.metrics_port}",
                "diesel-mount": urllib.parse.urlsplit(place).netloc,
            }
            with prometheus(tmp_path, addresses) as ask, reading(at):
                wanted = [each for dashboard in DASHBOARDS for each in queries(dashboard)]
                assert len(wanted) > 40
                wanted += re.findall(r"\b(?:diesel_\w+|up)\b", ALERTS.read_text())

                def unanswered() -> list[str]:
                    return [each for each in wanted if not ask(each)]

                wait_until(lambda: not unanswered(), otherwise=lambda: str(unanswered()))
                assert ask("ALERTS") == [], "an alert fires"
        finally:
            dlcmd("umount", "--force", at)


def test_the_dashboards_show_every_metric() -> None:
    shown = {name for each in DASHBOARDS for name in re.findall(r"diesel_\w+", each.read_text())}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    tables = (metrics.TABLE, metrics.PARENT_TABLE, mount_metrics.TABLE)
    assert shown == {metric.name for table in tables for metric in table}


def test_promtool_accepts_the_alerts_and_the_series_that_fire_them(tmp_path: Path) -> None:
    rules, fires = ALERTS, Path(__file__).with_name("alerts_test.yaml")
    for file in (rules, MONITORING / "prometheus.yaml", fires):
        shutil.copy(file, tmp_path)
    for command in ("check config prometheus.yaml", "test rules alerts_test.yaml"):
        done = subprocess.run(
            ["promtool", *command.split()], cwd=tmp_path, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    groups = yaml.safe_load(rules.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert alerts == set(re.findall(r'alertname="(\w+)"', fires.read_text()))
