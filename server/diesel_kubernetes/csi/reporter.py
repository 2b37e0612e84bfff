"""Reports the shares of datasets on this node to the cluster; the operator reads the reports.

The report is a ConfigMap of the driver's namespace (`../reports.py`). The plugin's pod owns it, so
the cluster deletes it when the node or the driver is removed. A thread of its own measures, since
mounts may hang. It writes a report if it differs noticeably from the last one, or if that one is
older than REFRESH_S.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import cast

from lightkube import Client
from lightkube.resources.core_v1 import ConfigMap, Pod
from lightkube.types import PatchType

from diesel_fs.errors import DieselError, NotFoundError

from ..api import api_errors
from ..reports import (
    REFRESH_S,
    HeldDataset,
    Json,
    NodeReport,
    config_map,
    differs_noticeably,
    make_report,
)

log = logging.getLogger("diesel.csi")

INTERVAL_S = 30.0

CLOSE_S = 5.0

Measure = Callable[[], tuple[list[HeldDataset], bool]]


class NodeReporter:
    """`pod` is the plugin's pod, the owner of the report ("": no owner)."""

    def __init__(
        self,
        client: Client,
        node: str,
        namespace: str,
        measure: Measure,
        *,
        pod: str = "",
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._node = node
        self._namespace = namespace
        self._measure = measure
        self._pod = pod
        self._interval_s = interval_s
        self._clock = clock
        self._written: NodeReport | None = None
        self._owner: Json | None = None
        self._is_failing = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diesel-csi-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Leaves the thread behind if it hangs. The written report stays."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def report(self) -> bool:
        """Returns whether a report was due and written. Raises DieselError."""
        datasets, is_complete = self._measure()
        now_s = self._clock()
        report = make_report(self._node, now_s, datasets, is_complete=is_complete)
        before = self._written
        if (
            before is not None
            and now_s - before.time_s < REFRESH_S
            and not differs_noticeably(before, report)
        ):
            return False
        self._write(report)
        self._written = report
        return True

    def _write(self, report: NodeReport) -> None:
        with api_errors():
            if self._pod and self._owner is None:
                pod = self._client.get(Pod, self._pod)
                uid = pod.metadata.uid if pod.metadata else None
                self._owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod, "uid": uid}
            made = config_map(report, self._namespace, self._owner)
            named = str(cast("Json", made["metadata"])["name"])
            try:
                with api_errors():
                    self._client.patch(ConfigMap, named, made, patch_type=PatchType.MERGE)
            except NotFoundError:
                self._client.create(cast("ConfigMap", ConfigMap.from_dict(made)))

    def _run(self) -> None:
        while True:
            try:
                self.report()
                self._is_failing = False
            except DieselError as error:
                if not self._is_failing:  # it is logged once
                    log.warning("cannot report what this node holds: %s", error)
                self._is_failing = True
            except Exception:
                log.exception("cannot report what this node holds (a bug)")
            if self._ending.wait(self._interval_s):
                return
