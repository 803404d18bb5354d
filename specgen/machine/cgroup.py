"""What the process's control groups leave it on Linux, where a container's limits stand; versions 2 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


OWN = Path("/proc/self/cgroup")  # a line a hierarchy: number, its controllers (none: version 2), the group


def memory_left() -> int | None:
    """Bytes that the tightest group still lets it take; None where no group has a limit. Cached files that are not
    in use count as free, as the machine's available memory counts them."""
    left = []
    for group in _groups("memory"):
        for most, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):  # no such file, or no limit ("max")
                limit, use = int((group / most).read_text()), int((group / used).read_text())
                left.append(max(0, limit - max(0, use - _statistic(group, cached))))
    return min(left, default=None)


def cores() -> float | None:
    """Cores whose time the tightest group lets it use; None where no group has a quota."""
    found = []
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):  # no such file, or no quota ("max")
            quota, period = (group / "cpu.max").read_text().split()
            found.append(float(quota) / float(period))
        with suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if float(quota) > 0:  # −1: no quota
                found.append(float(quota) / float(period))
    return min(found, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the process's groups with that controller, each followed by its parents, whose limits hold too.

    In a container the named group is often not to be seen; its limits then stand in the hierarchy's root.
    """
    with suppress(OSError, ValueError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = ROOT / controller if controllers else ROOT
            parts = [part for part in name.split("/") if part not in ("", "..")]
            yield from (root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _statistic(group: Path, name: str) -> int:
    """An entry of the group's memory.stat; 0 where it has none."""
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            key, value = line.split()
            if key == name:
                return int(value)
    return 0
