"""A small reader of EROFS, with which tests check images. It shares no code with the package.

It follows the kernel: it finds the device of an address in the device table, finds names by
bisection, first over the blocks of a folder and then in one, and refuses images of which the
kernel would complain (`Complaint`). `walk` also refuses faults that the kernel does not check:
unsorted folders, blocks of two inodes, and folders that two folders hold.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BLOCK = 4096
ReadAt = Callable[[int, int], bytes]
"""Reads (offset, length) of a device."""


TYPES = {0o10: 1, 0o04: 2, 0o12: 7}
"""Types of items, by the upper bits of a mode."""


class Complaint(Exception):
    """An error that the kernel would log, or take for a broken file system."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Complaint(what)


@dataclass(frozen=True)
class Inode:
    number: int
    is_inline: bool
    is_indexed: bool
    mode: int
    size: int
    block: int
    uid: int
    gid: int
    mtime_ns: int
    links: int


@dataclass(frozen=True)
class Item:
    name: bytes
    number: int
    type: int


class Erofs:
    """A file system on a primary device, which ends at the size in its superblock, and others."""

    def __init__(self, primary: bytes, *others: ReadAt) -> None:
        self.primary = primary
        fields = struct.unpack_from("<4s4xIBBHQ8x4xIII16s16sIHHHB", primary, 1024)
        magic, self.compatible, block_bits, slots, self.root, self.inodes, *rest = fields
        self.blocks, self.meta_block, self.xattr_block, self.uuid, self.name, *rest = rest
        self.features, _, devices, device_slot, folder_bits = rest
        require(magic == b"\xe2\xe1\xf5\xe0", "magic")
        require(1 << block_bits == BLOCK and slots == 0 and folder_bits == 0, "sizes of blocks")
        require(self.features in (8, 12) and b"\0" in self.name, "features")
        require(devices == len(others), "devices")
        require(self.blocks * BLOCK <= len(primary), "a short file")
        self.known: dict[tuple[int, int], list[Item]] = {}
        self.ranges: list[tuple[int, int, ReadAt]] = []  # first address, end, device
        self.others = others
        for number, device in enumerate(others):
            at = (device_slot + number) * 128
            count, mapped = struct.unpack_from("<II", primary, at + 64)
            require(mapped > 0, "a device without a range")
            self.ranges.append((mapped, mapped + count, device))

    def read_block(self, address: int) -> bytes:
        for first, end, device in self.ranges:
            if first <= address < end:
                content = device((address - first) * BLOCK, BLOCK)
                require(len(content) == BLOCK, "a short device")
                return content
        require(0 < address < self.blocks, f"block {address} is nowhere")
        return self.primary[address * BLOCK : (address + 1) * BLOCK]

    def inode(self, number: int) -> Inode:
        at = self.meta_block * BLOCK + number * 32
        require(at // BLOCK == (at + 63) // BLOCK, "an inode in two blocks")
        require(at + 64 <= self.blocks * BLOCK, "an inode behind the end")
        fields = struct.unpack_from("<HHHHQIIIIqII16s", self.primary, at)
        form, attributes, mode, spare, size, block, own_number, uid, gid, *rest = fields
        seconds, nanoseconds, links, spare2 = rest
        require(
            form in (1, 5, *[9] * (self.features == 12)) and not attributes,
            f"the form {form} of inode {number}",
        )
        require(not spare and not any(spare2), "bytes that are not in use")
        require(nanoseconds < 10**9 and 0 <= size < 1 << 63, "a time or size")
        mtime_ns = seconds * 10**9 + nanoseconds
        require(own_number == number, "the number of an inode")
        return Inode(number, form == 5, form == 9, mode, size, block, uid, gid, mtime_ns, links)

    def place(self, inode: Inode, page: int) -> tuple[int, int]:
        """The device, counted from 1, and the block there of a page of an indexed inode."""
        require(inode.block & ~0x1F == 0x20, "the form of an index")
        bits = inode.block & 0x1F
        number, rest = page >> bits, page & ((1 << bits) - 1)
        at = self.meta_block * BLOCK + inode.number * 32 + 64 + 8 * number
        require(at + 8 <= self.blocks * BLOCK, "an index behind the end")
        high, device, low = struct.unpack_from("<HHI", self.primary, at)
        require(not high and 1 <= device <= len(self.others), "a device")
        return device, low + rest

    def addresses(self, inode: Inode) -> list[int]:
        count = -(-inode.size // BLOCK) - inode.is_inline
        if inode.is_indexed:
            places = [self.place(inode, page) for page in range(count)]
            return [self.ranges[device - 1][0] + block for device, block in places]
        return list(range(inode.block, inode.block + count))

    def read_page(self, inode: Inode, page: int) -> bytes:
        length = min(BLOCK, inode.size - page * BLOCK)
        if inode.is_inline and page == (inode.size - 1) // BLOCK:
            at = self.meta_block * BLOCK + inode.number * 32 + 64
            require(at % BLOCK + length <= BLOCK, "inline data in two blocks")
            return self.primary[at : at + length]
        return self.whole_page(inode, page)[:length]

    def whole_page(self, inode: Inode, page: int) -> bytes:
        if not inode.is_indexed:
            return self.read_block(inode.block + page)
        device, block = self.place(inode, page)
        content = self.others[device - 1](block * BLOCK, BLOCK)
        require(len(content) == BLOCK, "a short device")
        return content

    def read(self, inode: Inode) -> bytes:
        return b"".join(self.read_page(inode, page) for page in range(-(-inode.size // BLOCK)))

    def items_in(self, folder: Inode, page: int) -> list[Item]:
        found = self.known.get((folder.number, page))
        if found is None:
            found = self.known[folder.number, page] = self.items(self.read_page(folder, page))
        return found

    def items(self, block: bytes) -> list[Item]:
        first = struct.unpack_from("<H", block, 8)[0]
        require(12 <= first < len(block) and first % 12 == 0, "a folder's block")
        records = list(struct.iter_unpack("<QHBB", block[:first]))
        ends = [record[1] for record in records[1:]] + [len(block)]
        found = []
        for (number, start, kind, spare), end in zip(records, ends, strict=True):
            name = block[start:end]
            if end == len(block):
                name = name.split(b"\0")[0]
            require(1 <= len(name) <= 255 and start <= end and not spare, "a name")
            found.append(Item(name, number, kind))
        return found

    def list(self, folder: Inode) -> list[Item]:
        pages = range(-(-folder.size // BLOCK))
        return [item for page in pages for item in self.items_in(folder, page)]

    def lookup(self, folder: Inode, name: bytes) -> Item | None:
        low, high = 0, -(-folder.size // BLOCK) - 1
        block = None
        while low <= high:
            middle = (low + high) // 2
            items = self.items_in(folder, middle)
            if items[0].name > name:
                high = middle - 1
            else:
                low, block = middle + 1, items
        low, high = 0, len(block or ()) - 1
        while block is not None and low <= high:
            middle = (low + high) // 2
            if block[middle].name == name:
                return block[middle]
            low, high = (middle + 1, high) if block[middle].name < name else (low, middle - 1)
        return None

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every path with its inode, the root's first. Asserts that the tree is sound."""
        todo = [(b"", self.root, self.root)]
        seen: dict[int, bytes] = {}
        used: dict[int, bytes] = {}
        while todo:
            path, number, parent = todo.pop()
            require(number not in seen, f"an inode of {path!r} and {seen.get(number)!r}")
            seen[number] = path
            inode = self.inode(number)
            for address in self.addresses(inode) if inode.size else ():
                require(address not in used, f"a block of {path!r} and {used.get(address)!r}")
                used[address] = path
            yield path, inode
            if inode.mode >> 12 != 0o04:
                continue
            items = self.list(inode)
            names = [item.name for item in items]
            require(names == sorted(set(names)), f"the folder {path!r} is not sorted")
            require(len({b".", b".."} & {*names}) == 2, f"the folder {path!r} lacks dots")
            for item in items:
                require(self.lookup(inode, item.name) == item, f"{item.name!r} is not found")
                require(item.type == TYPES[self.inode(item.number).mode >> 12], "a type")
                if item.name in (b".", b".."):
                    right = number if item.name == b"." else parent
                    require(item.number == right, f"a link of {path!r}")
                else:
                    child = path + b"/" + item.name if path else item.name
                    todo.append((child, item.number, number))
