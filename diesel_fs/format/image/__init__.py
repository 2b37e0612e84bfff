"""An image: a snapshot's tree as a file system that the Linux kernel mounts by itself (EROFS).

The kernel then answers look-ups, attributes and listings without a request to us. Contents lie on
another device of the file system, the **content file**, at addresses that the image gives
(FORMAT.md, section 9). Read `addresses`, then `tree` (the file system), then `file` (`build_image`
makes an image, `Image` opens it).
"""

from .addresses import BLOCK_BYTES, ImageTooLarge
from .file import FORMAT_VERSION, Image, build_image
from .tree import Shown

__all__ = ["BLOCK_BYTES", "FORMAT_VERSION", "Image", "ImageTooLarge", "Shown", "build_image"]
