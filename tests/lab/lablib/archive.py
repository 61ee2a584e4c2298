"""Writes an initramfs: a cpio archive in the `newc` form (linux: Documentation/driver-api/early-userspace/buffer-format.rst).

Needs no root, since ownership and device nodes are only numbers in the archive.
"""

import os
import re
import stat
import subprocess
from pathlib import Path, PurePosixPath


class Archive:
    """Files, folders and links by path; parents of a path are made as needed."""

    def __init__(self):
        self._entries = {}

    def folder(self, path, mode=0o755):
        self._add(path, stat.S_IFDIR | mode, b"")

    def file(self, path, data, mode=0o644):
        self._add(path, stat.S_IFREG | mode, data if isinstance(data, bytes) else data.encode())

    def link(self, path, target):
        self._add(path, stat.S_IFLNK | 0o777, target.encode())

    def program(self, source, path):
        """A program of this machine and the shared libraries it names, which keep their places."""
        self.file(path, Path(source).read_bytes(), 0o755)
        for library in _libraries(source):
            if str(PurePosixPath(library).relative_to("/")) not in self._entries:
                self.file(library, Path(os.path.realpath(library)).read_bytes(), 0o755)

    def write(self, destination):
        with open(destination, "wb") as out:
            for number, (path, (mode, data)) in enumerate(self._entries.items(), start=1):
                _write_entry(out, number, path, mode, data)
            _write_entry(out, 0, "TRAILER!!!", 0, b"")

    def _add(self, path, mode, data):
        path = PurePosixPath("/") / path
        for parent in reversed(path.parents[:-1]):
            self._entries.setdefault(str(parent.relative_to("/")), (stat.S_IFDIR | 0o755, b""))
        self._entries[str(path.relative_to("/"))] = (mode, data)


def _libraries(program):
    found = subprocess.run(["ldd", str(program)], capture_output=True, text=True)
    return re.findall(r"(/\S+) \(0x", found.stdout)


def _write_entry(out, number, path, mode, data):
    name = path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name), 0)
    out.write(b"070701" + b"".join(b"%08x" % field for field in fields) + name)
    out.write(bytes(-(110 + len(name)) % 4))
    out.write(data)
    out.write(bytes(-len(data) % 4))
