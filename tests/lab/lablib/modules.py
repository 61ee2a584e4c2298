"""Which kernel modules does a driver need, and in which order are they loaded? Read from the modules themselves."""

import lzma
import subprocess
from functools import cache
from pathlib import Path


class ModuleError(Exception):
    """A module that the kernel package does not have."""


@cache
def _index(folder):
    return {path.name.split(".ko")[0].replace("-", "_"): path for path in Path(folder).rglob("*.ko*")}


@cache
def unpacked(path):
    """A module's bytes, decompressed."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True).stdout
    return data


def load_order(kernel, names):
    """The modules `names` and all they depend on, as (name, bytes), each after what it needs.

    A name that the kernel has built in is an error like one that does not exist: the scenario should not list it.
    """
    index, order = _index(kernel.modules), {}

    def visit(name):
        name = name.replace("-", "_")
        if name in order:
            return
        if name not in index:
            raise ModuleError(f"kernel {kernel.release} has no module {name}")
        data = unpacked(index[name])
        for needed in _depends(data):
            visit(needed)
        order[name] = data

    for name in names:
        visit(name)
    return list(order.items())


def _depends(module):
    """The `depends=` entry of a module's .modinfo section."""
    at = module.find(b"\0depends=")
    if at < 0:
        return []
    text = module[at + 9 : module.index(b"\0", at + 9)].decode()
    return [name for name in text.split(",") if name]
