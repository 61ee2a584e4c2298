"""Did a run go as its scenario says? Splits what the host said into the host's and the guests' parts and checks each."""

import re
from dataclasses import dataclass, field

# What no guest may print, whatever its scenario says.
ALWAYS_FORBIDDEN = (r"Kernel panic", r"\bOops\b", r"\bBUG:", r"thread '.*' panicked")

# Exit statuses of a command that `timeout` ended.
TIMED_OUT = (124, 137, 143)


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and why it failed."""

    what: str
    fault: str = ""


@dataclass
class Part:
    """What one guest, or the host, printed; a guest also has an exit status once it has ended."""

    lines: list = field(default_factory=list)
    status: int | None = None
    seconds: int = 0
    checks: list = field(default_factory=list)
    conducted: bool = False

    def text(self):
        return "\n".join(self.lines)


def split(said):
    """The host's part, the guests' parts by name, and the faults that the host noticed."""
    host, guests, faults, current = Part(), {}, [], None
    for line in said.splitlines():
        if not line.startswith("@@lab "):
            (current or host).lines.append(line)
            continue
        word, *rest = line.removeprefix("@@lab ").split()
        if word == "guest" and rest:
            current = guests.setdefault(rest[0], Part())
        elif word == "end" and len(rest) == 4 and rest[0] in guests:
            guests[rest[0]].status, guests[rest[0]].seconds = int(rest[1]), int(rest[3]) - int(rest[2])
            current = None
        elif word == "check" and current is not None and len(rest) > 1:
            fault = "" if rest[0] == "ok" else "what it found stands in the log"
            current.checks.append(Check(" ".join(rest[1:]), fault))
        elif word == "conducted" and current is not None:
            current.conducted = True
        elif word == "fault":
            faults.append(" ".join(rest))
    return host, guests, faults


def tree(lines):
    """The last tree that the program pcitree printed among `lines`, or None."""
    found, current = None, None
    for line in lines:
        if line == "tree begin":
            current = []
        elif line == "tree end" and current is not None:
            found, current = current, None
        elif current is not None:
            current.append(line)
    return found


def checks_of_host(scenario, host, faults, ended):
    """Did the host come up as described?"""
    trouble = [*faults, *([ended] if ended else [])]
    yield Check("host", "; ".join(trouble))
    yield from _printed(scenario.expect, host)


def checks_of_guest(guest, part, host):
    """Did Banyan and its guest do what the scenario says?"""
    if part is None:
        yield Check("runs", "the host did not come to it")
        return
    yield Check(f"exit status {guest.exit}", _status_fault(guest, part))
    if guest.during:
        yield from part.checks
        yield Check("what runs beside the guest comes to its end", "" if part.conducted else "it did not")
    yield from _printed(guest.expect, part)
    for pattern in guest.forbid + ALWAYS_FORBIDDEN:
        found = re.search(pattern, part.text(), re.MULTILINE)
        if found or pattern in guest.forbid:
            yield Check(f"never prints /{pattern}/", f"it printed: {found[0]}" if found else "")
    if guest.same_tree:
        yield _same_tree(host, part)


def _printed(patterns, part):
    for pattern in patterns:
        yield Check(f"prints /{pattern}/", "" if re.search(pattern, part.text(), re.MULTILINE) else "it did not")


def _status_fault(guest, part):
    if part.status is None:
        return "it was still running when the host was ended"
    if part.status in TIMED_OUT and guest.exit not in TIMED_OUT:
        return f"it was ended, within its {guest.seconds} s or after them"
    return "" if part.status == guest.exit else f"it was {part.status}"


def _same_tree(host, part):
    what, wanted, seen = "the guest's tree equals the host's, pruned to the devices given", tree(host.lines), tree(part.lines)
    if wanted is None or seen is None:
        return Check(what, f"no tree printed by the {'host' if wanted is None else 'guest'}")
    return Check(what, "" if wanted == seen else "\n".join(["host:", *wanted, "guest:", *seen]))
