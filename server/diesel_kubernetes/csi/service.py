"""The gRPC services Identity and Node of CSI, over the logic of `node.py`.

A pool of threads serves the calls. A call that publishes a volume may wait for a mount, so at most
`PUBLISHES_MAX` such calls are served at once, and Probe always finds a thread.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BoolValue

import diesel_fs
from diesel_fs.errors import (
    BusyError,
    ConflictError,
    DeadlineError,
    DieselError,
    FormatError,
    MetadataError,
    NoSpaceError,
    NotFoundError,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
)

from ..names import DRIVER, POD_INFO, POD_NAME, POD_NAMESPACE
from . import csi_pb2 as csi
from .node import NodeVolumes
from .state import StateFolder

log = logging.getLogger("diesel.csi")

PUBLISHES_MAX = 100
OTHER_CALLS_MAX = 28

DEFAULT_TIMEOUT_S = 110.0
"""This is for a call without a deadline. Kubelet's own deadline is 120 s."""

END_GRACE_S = 5.0

FIELD_BYTES_MAX, MAP_BYTES_MAX = 128, 4096
"""CSI's limits for a text and for a map (its section "Size Limits")."""

DETAILS_CHARS_MAX = 3000
"""A status message is sent in headers, of which 8 KiB are sure to arrive."""

_CODES: tuple[tuple[type[DieselError], grpc.StatusCode], ...] = (
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (BusyError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ObjectStoreError, grpc.StatusCode.UNAVAILABLE),
    (MetadataError, grpc.StatusCode.UNAVAILABLE),
    (FormatError, grpc.StatusCode.DATA_LOSS),
    (NoSpaceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)

_MODES = frozenset(csi.VolumeCapability.AccessMode.Mode.values())

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


def code_of(error: DieselError) -> grpc.StatusCode:
    return next(
        (code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL
    )


class CsiServices:
    """Each call ends with an answer, or with a status for its error and one log line."""

    def __init__(self, volumes: NodeVolumes, state: StateFolder, node: str) -> None:
        self._volumes = volumes
        self._state = state
        self._node = node
        self._publishing = threading.BoundedSemaphore(PUBLISHES_MAX)

    def get_plugin_info(
        self, _: csi.GetPluginInfoRequest, __: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=DRIVER, vendor_version=diesel_fs.__version__)

    def get_plugin_capabilities(
        self, _: csi.GetPluginCapabilitiesRequest, __: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        """There is no controller service."""
        return csi.GetPluginCapabilitiesResponse()

    def probe(self, _: csi.ProbeRequest, context: grpc.ServicerContext) -> csi.ProbeResponse:
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
            self._state.check()
        except OSError as error:
            _abort(context, PermissionDenied(f"cannot open /dev/fuse: {error.strerror}"), "probe")
        except DieselError as error:
            _abort(context, error, "probe")
        return csi.ProbeResponse(ready=BoolValue(value=True))

    def node_publish_volume(
        self, request: csi.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodePublishVolumeResponse:
        attributes = dict(request.volume_context)
        pod = "/".join(attributes.get(name, "-") for name in (POD_NAMESPACE, POD_NAME))
        what = f"publish volume={_text(request.volume_id)} pod={_text(pod)}"
        what += f" target={_text(request.target_path)}"
        start_s = time.monotonic()
        if not self._publishing.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAVAILABLE, "too many volumes are being published")
        try:
            _check_id(request.volume_id)
            _check_capability(request.volume_capability)
            _check_map("volume attributes", attributes)
            remaining_s = context.time_remaining()
            volume = self._volumes.publish(
                request.target_path,
                attributes,
                dict(request.secrets),
                list(request.volume_capability.mount.mount_flags),
                timeout_s=DEFAULT_TIMEOUT_S if remaining_s is None else remaining_s,
                is_wanted=context.is_active,
            )
        except DieselError as error:
            _abort(context, error, what)
        finally:
            self._publishing.release()
        log.info("%s dataset=%s seconds=%.2f", what, volume.named, time.monotonic() - start_s)
        return csi.NodePublishVolumeResponse()

    def node_unpublish_volume(
        self, request: csi.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi.NodeUnpublishVolumeResponse:
        what = f"unpublish volume={_text(request.volume_id)} target={_text(request.target_path)}"
        try:
            _check_id(request.volume_id)
            self._volumes.unpublish(request.target_path)
        except DieselError as error:
            _abort(context, error, what)
        log.info("%s", what)
        return csi.NodeUnpublishVolumeResponse()

    def node_get_volume_stats(
        self, request: csi.NodeGetVolumeStatsRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetVolumeStatsResponse:
        try:
            _check_id(request.volume_id)
            found = self._volumes.condition(request.volume_path)
        except DieselError as error:
            _abort(context, error, f"stats volume={_text(request.volume_id)}")
        usage = []
        if found.usage is not None:
            size = found.usage.total_bytes
            unit = csi.VolumeUsage.Unit.BYTES
            usage.append(csi.VolumeUsage(total=size, used=size, unit=unit))
            if count := found.usage.entries:
                unit = csi.VolumeUsage.Unit.INODES
                usage.append(csi.VolumeUsage(total=count, used=count, unit=unit))
        condition = csi.VolumeCondition(
            abnormal=bool(found.trouble), message=found.trouble or "the volume can be read"
        )
        return csi.NodeGetVolumeStatsResponse(usage=usage, volume_condition=condition)

    def node_get_capabilities(
        self, _: csi.NodeGetCapabilitiesRequest, __: grpc.ServicerContext
    ) -> csi.NodeGetCapabilitiesResponse:
        kinds = csi.NodeServiceCapability.RPC.Type
        wanted = (kinds.GET_VOLUME_STATS, kinds.VOLUME_CONDITION, kinds.SINGLE_NODE_MULTI_WRITER)
        return csi.NodeGetCapabilitiesResponse(
            capabilities=[
                csi.NodeServiceCapability(rpc=csi.NodeServiceCapability.RPC(type=each))
                for each in wanted
            ]
        )

    def node_get_info(
        self, _: csi.NodeGetInfoRequest, __: grpc.ServicerContext
    ) -> csi.NodeGetInfoResponse:
        return csi.NodeGetInfoResponse(node_id=self._node)

    def handlers(self) -> Iterable[grpc.GenericRpcHandler]:
        yield grpc.method_handlers_generic_handler(
            "csi.v1.Identity",
            {
                "GetPluginInfo": _handler(self.get_plugin_info, csi.GetPluginInfoRequest),
                "GetPluginCapabilities": _handler(
                    self.get_plugin_capabilities, csi.GetPluginCapabilitiesRequest
                ),
                "Probe": _handler(self.probe, csi.ProbeRequest),
            },
        )
        yield grpc.method_handlers_generic_handler(
            "csi.v1.Node",
            {
                "NodePublishVolume": _handler(
                    self.node_publish_volume, csi.NodePublishVolumeRequest
                ),
                "NodeUnpublishVolume": _handler(
                    self.node_unpublish_volume, csi.NodeUnpublishVolumeRequest
                ),
                "NodeGetVolumeStats": _handler(
                    self.node_get_volume_stats, csi.NodeGetVolumeStatsRequest
                ),
                "NodeGetCapabilities": _handler(
                    self.node_get_capabilities, csi.NodeGetCapabilitiesRequest
                ),
                "NodeGetInfo": _handler(self.node_get_info, csi.NodeGetInfoRequest),
            },
        )


def _handler(
    method: Callable[[_Request, grpc.ServicerContext], _Response], request: type[_Request]
) -> "grpc.RpcMethodHandler[_Request, _Response]":
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


class GrpcServer:
    """Serves `CsiServices` at a unix socket, which other users cannot reach."""

    def __init__(self, services: CsiServices, endpoint: str) -> None:
        """`endpoint` is `unix:///path`. Raises UsageError for another address, and if the server
        cannot listen there; BusyError if another program does."""
        scheme, _, path = endpoint.partition("://")
        if scheme != "unix" or not path.startswith("/"):
            raise UsageError(
                f"bad endpoint {endpoint!r}", advice="write it as unix:///csi/csi.sock"
            )
        _remove_dead_socket(path)
        self._server = grpc.server(
            ThreadPoolExecutor(PUBLISHES_MAX + OTHER_CALLS_MAX, "diesel-csi"),
            options=[("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers(tuple(services.handlers()))
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            raise UsageError(
                f"cannot listen at {path}", advice="its folder must exist; see --endpoint"
            ) from None
        finally:
            os.umask(before)
        self._server.start()

    def stop(self) -> None:
        """Waits at most `END_GRACE_S` for the calls that are under way."""
        self._server.stop(END_GRACE_S).wait()


def _remove_dead_socket(path: str) -> None:
    """Removes a socket that a killed server left. Raises BusyError if a program listens at it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return
        else:
            raise BusyError(f"another program listens at {path}", advice="see --endpoint")


def _check_id(volume_id: str) -> None:
    if not volume_id:
        raise UsageError("the request names no volume")
    if len(volume_id.encode()) > FIELD_BYTES_MAX:
        raise UsageError(
            f"the volume's ID has {len(volume_id.encode())} bytes",
            advice=f"the specification of CSI allows {FIELD_BYTES_MAX}: shorten volumeHandle",
        )


def _check_capability(capability: csi.VolumeCapability) -> None:
    """Raises UsageError for a volume that is no folder, and for an unknown access mode; all known
    modes are accepted (VOLUMES.md)."""
    if capability.WhichOneof("access_type") != "mount":
        raise UsageError("a volume of this driver is a folder", advice="use volumeMode: Filesystem")
    mode = capability.access_mode.mode
    if mode not in _MODES or not mode:
        raise UsageError(f"the request names no known access mode ({mode})")
    mount = capability.mount
    if max(len(mount.fs_type.encode()), len(mount.volume_mount_group.encode())) > FIELD_BYTES_MAX:
        raise UsageError(f"a field of the volume capability is longer than {FIELD_BYTES_MAX} bytes")


def _check_map(what: str, given: Mapping[str, str]) -> None:
    """Raises UsageError for a map that is too large, or has a NUL byte, which no environment or
    argument can hold."""
    own = {name: value for name, value in given.items() if not name.startswith(POD_INFO)}
    total_bytes = sum(len(part.encode()) for item in own.items() for part in item)
    if total_bytes > MAP_BYTES_MAX:
        raise UsageError(
            f"{what} have {total_bytes} bytes",
            advice=f"the specification of CSI allows {MAP_BYTES_MAX}",
        )
    for name, value in given.items():
        if "\0" in name + value:
            raise UsageError(f"{what}: {name[:80]!r} holds a NUL byte")


def _text(text: str) -> str:
    return "".join(c if c.isprintable() and c != " " else "?" for c in text[:300])


def _abort(context: grpc.ServicerContext, error: DieselError, what: str) -> NoReturn:
    code = code_of(error)
    log.warning("%s failed code=%s why=%r", what, code.name, str(error))
    context.abort(code, str(error)[:DETAILS_CHARS_MAX])
    raise AssertionError("abort raises")
