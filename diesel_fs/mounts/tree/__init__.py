"""The tree that a mount shows: names, attributes, contents and `.diesel`. No FUSE here.

- `vfs.py` is the file system over a snapshot, for any session. Start here.
- `attributes.py` has its values: attributes, errnos, and the reserved node numbers.
- `dot_diesel.py` is the folder `.diesel`: statistics, lists of files, the control socket.
- `images.py` keeps the tree of a version as an EROFS image, for native mounts.
- `content_file.py` is the one virtual file with the contents of a native mount.

One rule: a node never gets another content, so the kernel may keep everything that it has learned.
"""
