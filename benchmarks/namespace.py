"""Where Ray is started on a machine of one's own: a network namespace that has nothing but loopback.

Ray listens on every network interface; a process namespace ends whatever was started inside.
"""

import fcntl
import os
import socket
import struct

NAMESPACE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
if os.geteuid():
    NAMESPACE.insert(1, "--map-root-user")
OBJECT_STORE_BYTES = 80 << 20  # near the least that Ray accepts


def bring_loopback_up():
    """`ip link set lo up`, which not every machine has."""
    read_flags, write_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, read_flags, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(any_socket, write_flags, struct.pack("16sh14x", b"lo", flags | up))
