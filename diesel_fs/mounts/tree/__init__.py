"""The tree that a mount shows: names, attributes, contents and `.diesel`. No FUSE here.

- `vfs.py` is the file system over a snapshot, for any session. Start here.
- `attributes.py` has its values: attributes, errors as errno, and the reserved node numbers.
- `dot_diesel.py` is the folder `.diesel`: statistics, lists of files, the control socket.
- `images.py` keeps the tree of a version as an EROFS image, for native mounts.
- `content_file.py` is the one virtual file that holds the contents of a native mount.

One rule: nodes and contents never change. An index of the snapshot is a node as long as the mount
lives, so the kernel may keep everything that it has learned once.
"""
