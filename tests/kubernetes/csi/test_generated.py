"""The generated Python of `csi.proto` is what its generator makes, and speaks CSI on the wire.

It is made anew by, in the folder `server`:

    python -m grpc_tools.protoc -I . --python_out . --pyi_out . diesel_kubernetes/csi/csi.proto
"""

import subprocess
import sys
from pathlib import Path

from diesel_kubernetes.csi import csi_pb2 as csi

SOURCES = Path(__file__).resolve().parents[3] / "server"
PROTO = "diesel_kubernetes/csi/csi.proto"


def test_the_generated_code_is_that_of_the_interface(tmp_path: Path) -> None:
    generator = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(SOURCES)]
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*generator, *outputs, PROTO], check=True, cwd=SOURCES)
    for name in ("csi_pb2.py", "csi_pb2.pyi"):
        made = (tmp_path / "diesel_kubernetes/csi" / name).read_text()
        assert made == (SOURCES / "diesel_kubernetes/csi" / name).read_text(), "see above"


def field(number: int, content: bytes) -> bytes:
    """A field of bytes or of a message in the encoding of protobuf."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def test_the_wire_is_that_of_the_specification() -> None:
    """Encoded by hand, with the numbers of CSI's specification."""
    pair = field(1, b"dataset") + field(2, b"pets")
    flag = field(2, b"ro")
    capability = field(2, flag) + field(3, bytes([1 << 3, 5]))
    message = (
        field(1, b"id") + field(4, b"/target") + field(5, capability) + bytes([6 << 3, 1])
        + field(7, field(1, b"key") + field(2, b"k")) + field(8, pair)
    )  # fmt: skip
    found = csi.NodePublishVolumeRequest.FromString(message)
    assert (found.volume_id, found.target_path, found.readonly) == ("id", "/target", True)
    assert found.volume_capability.mount.mount_flags == ["ro"]
    modes = csi.VolumeCapability.AccessMode.Mode
    assert found.volume_capability.access_mode.mode == modes.MULTI_NODE_MULTI_WRITER
    assert dict(found.secrets) == {"key": "k"}
    assert dict(found.volume_context) == {"dataset": "pets"}
    condition = csi.NodeGetVolumeStatsResponse(
        volume_condition=csi.VolumeCondition(abnormal=True, message="dead")
    )
    assert condition.SerializeToString() == field(2, bytes([1 << 3, 1]) + field(2, b"dead"))
