"""What does a scenario file say? Reads tests/lab/scenarios/NAME.toml into plain data and refuses what it does not know.

README.md explains every key to those who write scenarios.
"""

import re
import tomllib
from dataclasses import dataclass, field, fields, MISSING
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"

KERNELS = {"elf": "vmlinux", "bzimage": "vmlinuz"}


class ScenarioError(Exception):
    """A scenario file that cannot be read, with the file and the key."""


@dataclass(frozen=True)
class Guest:
    """One run of Banyan in the host."""

    name: str
    kernel: str = "elf"
    cpus: int = 1
    max_cpus: int = 0
    memory: str = "512M"
    cmdline: str = ""
    arguments: tuple = ()
    modules: tuple = ()
    script: str = ""
    before: str = ""
    during: str = ""
    after: str = ""
    user: int = 0
    expect: tuple = ()
    forbid: tuple = ()
    exit: int = 0
    seconds: int = 120
    same_tree: bool = False


@dataclass(frozen=True)
class Scenario:
    """A host and the guests to run in one boot of it."""

    name: str
    description: str
    guests: tuple
    devices: tuple = ()
    objects: tuple = ()
    networks: tuple = ()
    disks: dict = field(default_factory=dict)
    files: tuple = ()
    modules: tuple = ()
    tools: tuple = ()
    host_tools: tuple = ()
    numa: tuple = ()
    sriov: dict = field(default_factory=dict)
    bind: tuple = ()
    script: str = ""
    expect: tuple = ()
    cpus: int = 1
    memory: str = "4G"


def names():
    """All scenarios there are."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name):
    """The scenario of that name."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ScenarioError(f"no scenario {name}: there are {', '.join(names())}")
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path.name}: {error}") from error
    guests = tuple(_build(Guest, entry, f"{path.name}: guest {entry.get('name', '?')}") for entry in table.pop("guest", []))
    scenario = _build(Scenario, {**table, "name": name, "guests": guests}, path.name)
    _check(scenario, path.name)
    return scenario


def _build(kind, table, where):
    known = {f.name: f for f in fields(kind)}
    for key in table:
        if key not in known:
            raise ScenarioError(f"{where}: unknown key {key}; known are {', '.join(sorted(known))}")
    for key, entry in known.items():
        if entry.default is MISSING and entry.default_factory is MISSING and key not in table:
            raise ScenarioError(f"{where}: {key} is missing")
    for key, value in table.items():
        if not isinstance(value, tuple if key == "guests" else _toml_type(known[key].type)):
            raise ScenarioError(f"{where}: {key} has the wrong type ({type(value).__name__})")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})


def _toml_type(kind):
    return list if kind is tuple else kind


def _check(scenario, where):
    seen = set()
    for guest in scenario.guests:
        if not re.fullmatch(r"[a-z0-9-]+", guest.name) or guest.name in seen:
            raise ScenarioError(f"{where}: guest {guest.name!r} needs a name of its own made of a-z, 0-9 and -")
        seen.add(guest.name)
        if guest.kernel not in KERNELS:
            raise ScenarioError(f"{where}: guest {guest.name}: kernel {guest.kernel!r} is none of {', '.join(KERNELS)}")
    for owner, patterns in [("host", scenario.expect), *((g.name, g.expect + g.forbid) for g in scenario.guests)]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ScenarioError(f"{where}: {owner}: pattern {pattern!r}: {error}") from error
